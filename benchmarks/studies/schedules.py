"""Schedules of the learning rate times optimizers, sparse beside dense."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.studies.study import Result, Study, markdown
from benchmarks.studies.tasks import Task, small_digits_task
from benchmarks.studies.training import train
from horovod_sparse.feedback import BestFeedback, ErrorFeedback, Recipe, recipe

SETTING: dict[str, Any] = {"density": 0.01, "size": 2, "num_steps": 240}
SEEDS = (0, 1, 2)


def _cosine(part: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * part))


def _one_cycle(part: float) -> float:
    return part / 0.3 if part < 0.3 else _cosine((part - 0.3) / 0.7)


#: share of the largest rate, of the share of steps done (0 to 1, both included): each ends in a rate of 0
#: exactly, but for the first two
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda part: 1.0,
    "warm-up": lambda part: min(1.0, 3.0 * part),
    "cosine to 0": _cosine,
    "one-cycle": _one_cycle,
    "warm restarts": lambda part: 0.0 if part == 1.0 else _cosine((3.0 * part % 1.0) / (1.0 - 3.0 / 240)),
}
#: optimizer -> largest learning rate, and how it is made. Momentum's goes ten times as far as plain SGD's.
OPTIMIZERS: dict[str, tuple[float, Callable[..., torch.optim.Optimizer]]] = {
    "SGD": (1.0, partial(torch.optim.SGD, lr=1.0)),
    "momentum": (0.1, partial(torch.optim.SGD, lr=1.0, momentum=0.9)),
    "Nesterov": (0.1, partial(torch.optim.SGD, lr=1.0, momentum=0.9, nesterov=True)),
    "AdamW": (0.01, partial(torch.optim.AdamW, lr=1.0)),
}


METHODS = ("dense", "topk", "exdyna")
#: optimizers for which `feedback=best` is another than `feedback=error`
_REMEDIED = ("momentum", "AdamW")


def names() -> list[str]:
    """Schedule, optimizer, method and seed."""
    rows = list(itertools.product(SCHEDULES, OPTIMIZERS, METHODS))
    rows += itertools.product(("cosine to 0", "warm restarts"), OPTIMIZERS, ("topk, scaled",))
    rows += itertools.product(SCHEDULES, _REMEDIED, [f"{method}, best" for method in METHODS[1:]])
    return [f"{'/'.join(row)}/seed {seed}" for row in rows for seed in SEEDS]


def _recipe(method: str, density: float) -> Recipe:
    if method == "dense":
        return recipe("topk", density=1.0)
    algorithm, _, form = method.partition(", ")
    feedback = BestFeedback() if form == "best" else ErrorFeedback(scale_residual=form == "scaled")
    return recipe(algorithm, density=density, feedback=feedback)


def measure(name: str, task: Task | None = None, setting: dict[str, Any] = SETTING) -> Result:
    """Trains once."""
    schedule, optimizer, method, seed = name.split("/")
    rate, make_optimizer = OPTIMIZERS[optimizer]
    last = setting["num_steps"] - 1
    trace = train(
        task or small_digits_task(),
        _recipe(method, setting["density"]),
        size=setting["size"],
        num_steps=setting["num_steps"],
        learning_rate_at=lambda step: rate * SCHEDULES[schedule](step / last),
        seed=int(seed.removeprefix("seed ")),
        make_optimizer=make_optimizer,
    )
    return {
        "accuracy": round(trace.score, 4),
        "largest_applied": float(f"{max(trace.applied_norms):.4g}"),
    }


def of(result: dict[str, Any], schedule: str, how: str, method: str) -> list[dict[str, Any]]:
    """The runs of all seeds."""
    prefix = f"{schedule}/{how}/{method}/"
    return [run for name, run in result["runs"].items() if name.startswith(prefix)]


def accuracy(runs: Sequence[dict[str, Any]]) -> float:
    """Mean over the seeds."""
    return float(np.mean([run["accuracy"] for run in runs]))


def _against(runs: Sequence[dict[str, Any]], dense: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return "-"
    return f"{accuracy(runs):.1%} ({100 * (accuracy(runs) - accuracy(dense)):+.1f})"


def table(result: dict[str, Any]) -> str:
    """Accuracy by optimizer and schedule, and what sparse has less than dense, in points."""
    rows, methods = [], (*METHODS[1:], "topk, scaled", "topk, best", "exdyna, best")
    for optimizer in OPTIMIZERS:
        for schedule in SCHEDULES:
            dense = of(result, schedule, optimizer, "dense")
            if not dense:
                continue
            found = {method: of(result, schedule, optimizer, method) for method in methods}
            cells = [_against(runs, dense) for runs in found.values()]
            largest = [max(run["largest_applied"] for run in runs) for runs in (dense, found["topk"])]
            rows.append(
                [f"{optimizer}, {schedule}", f"{accuracy(dense):.1%}", *cells, *(f"{n:.3g}" for n in largest)]
            )
    head = ["training", "dense", *methods, "largest gradient, dense", "topk"]
    return markdown(head, rows)


STUDY = Study(
    "schedules",
    names,
    measure,
    table,
    facts={"setting": SETTING},
)
