"""What becomes of the residual when the learning rate falls: scaled as the papers' equations do, or not.

scripts/study feedback              run what is missing, then write the table
scripts/study feedback --again      measure everything anew
scripts/study feedback --draw       only the table, from docs/measurements/feedback.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from rich.progress import track

from horovod_sparse.feedback import ErrorFeedback, recipe
from studies import results
from studies.tasks import Task, digits_task
from studies.training import train

__all__ = ["main", "measure", "table"]

FILE = results.MEASUREMENTS / "feedback.json"
SETTING = {"learning_rate": 0.02, "density": 0.01, "size": 4, "num_steps": 400, "drop_at": 300}
SEEDS = (0, 1, 2)
ALGORITHMS = ("exdyna", "topk")
FORMS = {"scaled": True, "unscaled": False}


def measure(
    task: Task,
    algorithm: str,
    form: str,
    seed: int,
    setting: dict[str, Any],
    progress: Callable[..., Any] = lambda steps: steps,
) -> dict[str, Any]:
    """One training."""
    trace = train(
        task,
        recipe(algorithm, density=setting["density"], feedback=ErrorFeedback(scale_residual=FORMS[form])),
        size=setting["size"],
        num_steps=setting["num_steps"],
        learning_rate_at=lambda step: setting["learning_rate"] * (0.1 if step >= setting["drop_at"] else 1.0),
        seed=seed,
        progress=progress,
    )
    return {
        "losses": [float(f"{loss:.4g}") for loss in trace.losses],
        "accuracy": round(trace.score, 4),
        "seconds": round(trace.seconds, 1),
    }


def of(result: dict[str, Any], algorithm: str, form: str) -> list[dict[str, Any]]:
    """The runs of all seeds."""
    prefix = f"{algorithm}, {form}/"
    return [run for name, run in result["runs"].items() if name.startswith(prefix)]


def table(result: dict[str, Any]) -> str:
    """Loss before and after the drop, and accuracy, as mean and range over the seeds."""
    drop, rows = result["setting"]["drop_at"], []
    for algorithm in ALGORITHMS:
        for form in FORMS:
            runs = of(result, algorithm, form)
            if not runs:
                continue
            losses = np.array([run["losses"] for run in runs])
            spans = [losses[:, first : first + 20] for first in (drop - 20, drop, losses.shape[1] - 20)]
            accuracies = [run["accuracy"] for run in runs]
            rows.append(
                [
                    f"{algorithm}, {form}",
                    *(f"{span.mean():.4f}" for span in spans),
                    f"{np.mean(accuracies):.1%} ({min(accuracies):.1%} to {max(accuracies):.1%})",
                ]
            )
    head = ["residual", "loss, 20 steps before", "20 steps after", "last 20 steps", "test accuracy"]
    return results.markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and writes the table."""
    parser = results.command_line("scripts/study feedback", __doc__, FILE)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = results.load(options.json)
    if not options.draw:
        result |= {"command": "scripts/study feedback", "machine": results.machine(), "setting": SETTING}
        runs, task = result.setdefault("runs", {}), digits_task(width=320)
        for seed in SEEDS:
            for algorithm in ALGORITHMS:
                for form in FORMS:
                    name = f"{algorithm}, {form}/seed {seed}"
                    if name in runs and not options.again:
                        continue
                    runs[name] = measure(
                        task,
                        algorithm,
                        form,
                        seed,
                        SETTING,
                        lambda steps, name=name: track(steps, description=name, total=SETTING["num_steps"]),
                    )
                    results.save(options.json, result)
    if options.json == FILE:
        results.write_appendix()
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
