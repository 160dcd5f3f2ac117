"""Asked and achieved density over the steps of real trainings, for both threshold rules.

scripts/study threshold             run what is missing, then draw and write the tables
scripts/study threshold --again     measure everything anew
scripts/study threshold --draw      only pictures and tables, from docs/measurements/threshold.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from rich.progress import track

from horovod_sparse.feedback import ErrorFeedback, Recipe, recipe
from horovod_sparse.sparsifiers.schedule import Exponential
from horovod_sparse.thresholds import Sketch
from studies import results
from studies.tasks import Task, digits_task, text_task
from studies.training import Trace, train

__all__ = ["RULES", "Setting", "facts", "main", "measure", "record", "table"]

FILE = results.MEASUREMENTS / "threshold.json"

#: variants: the table's words -> arguments of the sparsifier
RULES: dict[str, dict[str, Any]] = {
    "exdyna sketch": {"name": "exdyna", "threshold": "sketch"},
    "exdyna sketch, memory=0": {"name": "exdyna", "threshold": Sketch(memory=0.0)},
    "exdyna sketch, rebalance=paper": {"name": "exdyna", "threshold": "sketch", "rebalance": "paper"},
    "exdyna paper": {"name": "exdyna", "threshold": "paper"},
    "micro sketch": {"name": "micro", "threshold": "sketch"},
    "micro paper": {"name": "micro", "threshold": "paper"},
}


class Setting:
    """What is the same for all runs of a task.

    Args:
        task: model and data.
        learning_rate: until `drop_at`, a tenth of it from then on.
        density: after the warm-up.
        size: P.
        num_steps: of a training.
        warmup_steps: from density 0.25 down, exponentially.
        drop_at: step (from 0) of the first smaller learning rate.
    """

    def __init__(
        self,
        task: Task,
        learning_rate: float,
        density: float = 0.01,
        size: int = 4,
        num_steps: int = 500,
        warmup_steps: int = 100,
        drop_at: int = 300,
    ) -> None:
        self.task, self.learning_rate, self.density, self.size = task, learning_rate, density, size
        self.num_steps, self.warmup_steps, self.drop_at = num_steps, warmup_steps, drop_at

    def recipe(self, variant: str) -> Recipe:
        """What every rank does."""
        return recipe(
            **RULES[variant],
            density=self.density,
            schedule=Exponential(steps=self.warmup_steps),
            feedback=ErrorFeedback(scale_residual=True),
        )

    def learning_rate_at(self, step: int) -> float:
        """Of a step, from 0."""
        return self.learning_rate * (0.1 if step >= self.drop_at else 1.0)

    def describe(self) -> dict[str, Any]:
        """For the JSON."""
        names = ("learning_rate", "density", "size", "num_steps", "warmup_steps", "drop_at")
        return {name: getattr(self, name) for name in names}


def settings() -> dict[str, Setting]:
    """The trainings."""
    return {
        "digits": Setting(digits_task(), learning_rate=0.02),
        "text": Setting(text_task(), learning_rate=0.5),
    }


def record(trace: Trace, task: Task) -> dict[str, Any]:
    """A trace as JSON, numbers shortened."""

    def short(values: Sequence[float], digits: int) -> list[float | None]:
        return [None if np.isnan(value) else float(f"{value:.{digits}g}") for value in values]

    return {
        "num_elements": trace.num_elements,
        "targets": trace.targets,
        "counts": trace.counts,
        "imbalance": short(trace.imbalance, 4),
        "global_error": short(trace.global_error, 4),
        "score_name": task.score_name,
        "score": round(trace.score, 4),
        "final_loss": float(f"{np.mean(trace.losses[-20:]):.4g}"),
        "seconds": round(trace.seconds, 1),
    }


def measure(
    setting: Setting, variant: str, progress: Callable[..., Any] = lambda steps: steps
) -> dict[str, Any]:
    """One training."""
    trace = train(
        setting.task,
        setting.recipe(variant),
        size=setting.size,
        num_steps=setting.num_steps,
        learning_rate_at=setting.learning_rate_at,
        progress=progress,
    )
    return record(trace, setting.task)


def facts(run: dict[str, Any]) -> dict[str, float | int | None]:
    """What a run's counts say against the target.

    Returns:
        factor: count / k in step 1. mean, worst: of |count / k - 1| from step 5 on. settled: first step
        (from 1) from which ten steps in a row are within 10 %, None if there is none.
    """
    quotient = np.array(run["counts"]) / np.array(run["targets"])
    error = np.abs(quotient - 1.0)
    within = np.lib.stride_tricks.sliding_window_view(error <= 0.1, min(10, error.size)).all(axis=1)
    return {
        "factor": float(quotient[0]),
        "mean": float(error[4:].mean()),
        "worst": float(error[4:].max()),
        "settled": int(np.argmax(within)) + 1 if within.any() else None,
    }


def table(result: dict[str, Any]) -> str:
    """The runs against the target, in Markdown."""
    rows = []
    for name, run in result["runs"].items():
        task, variant = name.split("/")
        fact = facts(run)
        score = f"{run['score']:.1%}" if run["score_name"] == "test accuracy" else f"{run['score']:.2f} bits"
        rows.append(
            [
                f"{task}, {variant}",
                f"{run['targets'][-1]:,}",
                f"{fact['factor']:.3g}",
                f"{fact['mean']:.1%}",
                f"{fact['worst']:.0%}",
                str(fact["settled"] or "never"),
                score,
            ]
        )
    head = ["training", "k", "count / k, step 1", "mean error", "worst", "settled in step", "score"]
    return results.markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, draws, and writes the table."""
    parser = results.command_line("scripts/study threshold", __doc__, FILE)
    parser.add_argument("--task", choices=["digits", "text"], help="measure this training only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = results.load(options.json)
    if not options.draw:
        chosen = {name: one for name, one in settings().items() if options.task in (None, name)}
        result.setdefault("command", "scripts/study threshold")
        result["machine"] = results.machine()
        result["settings"] = {name: one.describe() for name, one in settings().items()}
        runs = result.setdefault("runs", {})
        for task, setting in chosen.items():
            for variant in RULES:
                name = f"{task}/{variant}"
                if name in runs and not options.again:
                    continue
                runs[name] = measure(
                    setting,
                    variant,
                    lambda steps, name=name, setting=setting: track(
                        steps, description=name, total=setting.num_steps
                    ),
                )
                results.save(options.json, result)
    if options.json == FILE:
        from studies import threshold_pictures

        threshold_pictures.draw(result)
        results.write_appendix()
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
