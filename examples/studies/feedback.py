"""What becomes of the residual when the learning rate falls: scaled as the papers' equations do, or not.

scripts/feedback_study              run what is missing, then draw and write the table
scripts/feedback_study --again      measure everything anew
scripts/feedback_study --draw       only picture and table, from docs/measurements/feedback.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
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


def draw(result: dict[str, Any]) -> None:
    """Training loss around the drop, mean over seeds, smoothed over 10 steps."""
    results.PICTURES.mkdir(parents=True, exist_ok=True)
    drop = result["setting"]["drop_at"]
    figure, grid = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axes, algorithm in zip(grid, ALGORITHMS, strict=True):
        for form, color in (("scaled", "#1f5fbf"), ("unscaled", "#c44e00")):
            runs = of(result, algorithm, form)
            if runs:
                mean = np.mean([run["losses"] for run in runs], axis=0)
                smooth = np.convolve(mean, np.full(10, 0.1), mode="valid")
                axes.plot(np.arange(10, mean.size + 1), smooth, color=color, linewidth=1.2, label=form)
        axes.axvline(drop + 1, color="black", linewidth=0.6, linestyle=":")
        axes.set_yscale("log")
        axes.set_title(f"{algorithm}, density {result['setting']['density']:g}", fontsize=10)
        axes.set_xlabel("step (dotted: learning rate x 0.1)")
        axes.grid(True, linewidth=0.3)
    grid[0].set_ylabel("training loss")
    grid[0].legend(title="residual", fontsize=9)
    figure.savefig(results.PICTURES / "feedback.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, draws, and writes the table."""
    parser = results.command_line("scripts/feedback_study", __doc__, FILE)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = results.load(options.json)
    if not options.draw:
        result |= {"command": "scripts/feedback_study", "machine": results.machine(), "setting": SETTING}
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
        draw(result)
        results.DOCUMENT.write_text(
            results.with_table(results.DOCUMENT.read_text(), "feedback", table(result))
        )
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
