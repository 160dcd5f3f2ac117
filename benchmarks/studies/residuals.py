"""SparDL's discards, in small: global, partial and local residuals on six simulated ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.studies.study import Result, Study, markdown, rounded
from benchmarks.studies.tasks import Task, digits_task, text_task
from benchmarks.studies.training import train
from horovod_sparse.feedback import recipe

MODES = ("global", "partial", "local")
SEEDS = (0, 1, 2)
#: every mode is trained at every rate, and shown at the one that suits it best
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"density": 0.001, "size": 6, "num_steps": 500, "rates": [0.1, 0.2]},
    "text": {"density": 0.001, "size": 6, "num_steps": 500, "rates": [2.0, 4.0]},
}


def names() -> list[str]:
    """Task, mode, rate and seed."""
    return [
        f"{task}/{mode}/{rate:g}/seed {seed}"
        for task, setting in SETTINGS.items()
        for seed in SEEDS
        for rate in setting["rates"]
        for mode in MODES
    ]


def measure(run: str, task: Task | None = None, setting: dict[str, Any] | None = None) -> Result:
    """Trains once, with plain SGD: momentum would apply a gradient that has waited ten times over.

    A cosine takes the rate to 0, so that what is held back at the end is little.
    """
    name, mode, rate, seed = run.split("/")
    setting = setting or SETTINGS[name]
    if task is None:
        task = digits_task(width=128) if name == "digits" else text_task(width=128, batch_size=8)
    steps = setting["num_steps"]
    trace = train(
        dataclasses.replace(task, momentum=0.0),
        recipe("spardl", density=setting["density"], residuals=mode),
        size=setting["size"],
        num_steps=steps,
        learning_rate_at=lambda step: float(rate) * 0.5 * (1.0 + math.cos(math.pi * step / steps)),
        seed=int(seed.removeprefix("seed ")),
    )
    return {
        "score_name": task.score_name,
        "score": round(trace.score, 4),
        "losses": rounded(trace.losses),
    }


def best(result: Result, task: str, mode: str) -> tuple[float, list[Result]]:
    """The rate at which a mode does best on average over its seeds, and the runs at that rate."""
    by_rate: dict[float, list[Result]] = {}
    for name, run in result["runs"].items():
        of_task, of_mode, rate, _ = name.split("/")
        if (of_task, of_mode) == (task, mode):
            by_rate.setdefault(float(rate), []).append(run)

    def merit(rate: float) -> float:
        mean = float(np.mean([run["score"] for run in by_rate[rate]]))
        return mean if by_rate[rate][0]["score_name"] == "test accuracy" else -mean

    rate = max(by_rate, key=merit)
    return rate, by_rate[rate]


def _scores(runs: Sequence[Result]) -> str:
    scores = [run["score"] for run in runs]
    if runs[0]["score_name"] == "test accuracy":
        return f"{np.mean(scores):.2%} ({min(scores):.1%} to {max(scores):.1%})"
    return f"{np.mean(scores):.3f} bits ({min(scores):.3f} to {max(scores):.3f})"


def table(result: Result) -> str:
    """Score and training loss of every mode at its best rate, mean and range over the seeds."""
    rows = []
    for task in result["settings"]:
        for mode in MODES:
            rate, runs = best(result, task, mode)
            losses = np.array([run["losses"][-50:] for run in runs]).mean(axis=1)
            loss = f"{losses.mean():.3f} ({losses.min():.3f} to {losses.max():.3f})"
            rows.append([f"{task}, {mode}", f"{rate:g}", str(len(runs)), _scores(runs), loss])
    return markdown(["residuals", "learning rate", "seeds", "test score", "loss, last 50 steps"], rows)


STUDY = Study("residuals", names, measure, table, facts={"settings": SETTINGS})
