"""What becomes of SparDL's discards, in small: global, partial and local residuals on six simulated ranks.

scripts/study residuals              run what is missing, then write the table
scripts/study residuals --again      measure everything anew
scripts/study residuals --draw       only the table, from docs/measurements/residuals.json
scripts/study residuals --real       the first steps on six processes with horovodrun, against the simulated
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from rich.progress import track

from horovod_sparse.feedback import Recipe, recipe
from studies import results
from studies.tasks import Task, digits_task, text_task
from studies.training import train

__all__ = ["MODES", "SETTINGS", "best", "main", "measure", "rate_at", "recipe_of", "table", "task_of"]

FILE = results.MEASUREMENTS / "residuals.json"
MODES = ("global", "partial", "local")
SEEDS = (0, 1, 2)
#: every mode is trained at every rate, and shown at the one that suits it best
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"density": 0.001, "size": 6, "num_steps": 500, "rates": [0.1, 0.2]},
    "text": {"density": 0.001, "size": 6, "num_steps": 500, "rates": [2.0, 4.0]},
}


def task_of(name: str) -> Task:
    """Model and data. Plain SGD: momentum would apply a gradient that has waited ten times over."""
    if name == "digits":
        return dataclasses.replace(digits_task(width=128), momentum=0.0)
    return text_task(width=128, batch_size=8)


def recipe_of(setting: dict[str, Any], mode: str) -> Recipe:
    """What every rank does."""
    return recipe("spardl", density=setting["density"], residuals=mode)


def rate_at(rate: float, setting: dict[str, Any]) -> Callable[[int], float]:
    """The learning rate of every step: a cosine to 0, so that what is held back at the end is little."""
    return lambda step: rate * 0.5 * (1.0 + math.cos(math.pi * step / setting["num_steps"]))


def measure(
    task: Task,
    setting: dict[str, Any],
    mode: str,
    rate: float,
    seed: int,
    progress: Callable[..., Any] = lambda steps: steps,
) -> dict[str, Any]:
    """One training."""
    trace = train(
        task,
        recipe_of(setting, mode),
        size=setting["size"],
        num_steps=setting["num_steps"],
        learning_rate_at=rate_at(rate, setting),
        seed=seed,
        progress=progress,
    )
    return {
        "score_name": task.score_name,
        "score": round(trace.score, 4),
        "losses": [float(f"{loss:.4g}") for loss in trace.losses],
        "seconds": round(trace.seconds, 1),
    }


def best(result: dict[str, Any], task: str, mode: str) -> tuple[float, list[dict[str, Any]]]:
    """The rate at which a mode does best on average over its seeds, and the runs at that rate."""
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for name, run in result["runs"].items():
        of_task, of_mode, rate, _ = name.split("/")
        if (of_task, of_mode) == (task, mode):
            by_rate.setdefault(float(rate), []).append(run)

    def merit(runs: list[dict[str, Any]]) -> float:
        mean = float(np.mean([run["score"] for run in runs]))
        return mean if runs[0]["score_name"] == "test accuracy" else -mean

    rate = max(by_rate, key=lambda rate: merit(by_rate[rate]))
    return rate, by_rate[rate]


def _scores(runs: Sequence[dict[str, Any]]) -> str:
    scores = [run["score"] for run in runs]
    if runs[0]["score_name"] == "test accuracy":
        return f"{np.mean(scores):.2%} ({min(scores):.1%} to {max(scores):.1%})"
    return f"{np.mean(scores):.3f} bits ({min(scores):.3f} to {max(scores):.3f})"


def table(result: dict[str, Any]) -> str:
    """Score and training loss of every mode at its best rate, mean and range over the seeds."""
    rows = []
    for task in result["settings"]:
        for mode in MODES:
            rate, runs = best(result, task, mode)
            losses = np.array([run["losses"][-50:] for run in runs]).mean(axis=1)
            rows.append(
                [
                    f"{task}, {mode}",
                    f"{rate:g}",
                    str(len(runs)),
                    _scores(runs),
                    f"{losses.mean():.3f} ({losses.min():.3f} to {losses.max():.3f})",
                ]
            )
    return results.markdown(
        ["residuals", "learning rate", "seeds", "test score", "loss, last 50 steps"], rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and writes the table."""
    parser = results.command_line("scripts/study residuals", __doc__, FILE)
    parser.add_argument("--real", action="store_true", help="compare with six processes, too")
    parser.add_argument("--task", choices=list(SETTINGS), help="this training only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = results.load(options.json)
    if not options.draw:
        result |= {
            "command": "scripts/study residuals",
            "machine": results.machine(),
            "settings": SETTINGS,
        }
        runs = result.setdefault("runs", {})
        for task, setting in SETTINGS.items():
            if options.task not in (None, task):
                continue
            for seed in SEEDS:
                for rate in setting["rates"]:
                    for mode in MODES:
                        name = f"{task}/{mode}/{rate:g}/seed {seed}"
                        if name in runs and not options.again:
                            continue
                        runs[name] = measure(
                            task_of(task),
                            setting,
                            mode,
                            rate,
                            seed,
                            lambda steps, name=name, total=setting["num_steps"]: track(
                                steps, description=name, total=total
                            ),
                        )
                        results.save(options.json, result)
    if options.real:
        from studies import residual_ranks

        result["real_ranks"] = residual_ranks.compared()
        results.save(options.json, result)
    if options.json == FILE:
        results.write_appendix()
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
