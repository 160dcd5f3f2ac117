"""Schedules of the learning rate times optimizers, sparse beside dense; and what helps where sparse loses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.studies.study import Result, Study, markdown
from benchmarks.studies.tasks import Task, small_digits_task
from benchmarks.studies.training import train
from horovod_sparse.arrays import FoldRule
from horovod_sparse.feedback import BestFeedback, ErrorFeedback, MomentumCorrection, Recipe, recipe
from horovod_sparse.feedback.feedbacks import Rates
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.sparsifiers.schedule import Exponential

SETTING: dict[str, Any] = {"density": 0.01, "size": 2, "num_steps": 240}
SEEDS = (0, 1, 2)

Edit = Callable[[torch.optim.Optimizer, torch.Tensor], None]


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


@dataclass(frozen=True)
class _Decaying(ErrorFeedback):
    """What is held back fades: ``acc = 0.95 e + g``. Loses what it forgets; only measured here."""

    def rule(self, info: BucketInfo, rates: Rates) -> FoldRule:
        return replace(super().rule(info, rates), decay=0.95)


def _clip(optimizer: torch.optim.Optimizer, applied: torch.Tensor) -> None:
    applied *= min(1.0, 1.0 / (float(applied.norm()) + 1e-12))


def _mask(optimizer: torch.optim.Optimizer, applied: torch.Tensor) -> None:
    """The optimizer's momentum begins anew where something is applied."""
    parameters = optimizer.param_groups[0]["params"]
    parts = applied.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        if (buffer := optimizer.state[parameter].get("momentum_buffer")) is not None:
            buffer[part.view_as(parameter) != 0] = 0.0


#: what may help -> arguments of the recipe, the optimizer, its largest rate, and what is done to the sum
REMEDIES: dict[str, tuple[dict[str, Any], str, float, Edit | None]] = {
    "nothing": ({}, "momentum", 0.1, None),
    "what is applied is clipped to norm 1": ({}, "momentum", 0.1, _clip),
    "local clipping, `clip_norm=1`": ({"feedback": ErrorFeedback(clip_norm=1.0)}, "momentum", 0.1, None),
    "residual times 0.95 in every step": ({"feedback": _Decaying()}, "momentum", 0.1, None),
    "the optimizer's momentum cleared where values arrive": ({}, "momentum", 0.1, _mask),
    "density from 0.25 in 60 steps": ({"schedule": Exponential(steps=60)}, "momentum", 0.1, None),
    "a tenth of the rate": ({}, "momentum", 0.01, None),
    "`feedback=momentum`": ({"feedback": MomentumCorrection(momentum=0.9)}, "SGD", 0.1, None),
    "`feedback=momentum`, not masked": (
        {"feedback": MomentumCorrection(momentum=0.9, masking=False)},
        "SGD",
        0.1,
        None,
    ),
    "no momentum, ten times the rate": ({}, "SGD", 1.0, None),
}
#: rows of the remedies that are rows of the optimizers, too
_SAME = {"nothing": "momentum", "no momentum, ten times the rate": "SGD"}
METHODS = ("dense", "topk", "exdyna")
#: optimizers for which `feedback=best` is another than `feedback=error`
_REMEDIED = ("momentum", "AdamW")


def names() -> list[str]:
    """Schedule, optimizer, method and seed; remedies stand in the optimizer's place."""
    rows = list(itertools.product(SCHEDULES, OPTIMIZERS, METHODS))
    rows += itertools.product(("cosine to 0", "warm restarts"), OPTIMIZERS, ("topk, scaled",))
    rows += itertools.product(SCHEDULES, _REMEDIED, [f"{method}, best" for method in METHODS[1:]])
    left = [remedy for remedy in REMEDIES if remedy not in _SAME]
    rows += itertools.product(("warm restarts",), left, METHODS[1:])
    return [f"{'/'.join(row)}/seed {seed}" for row in rows for seed in SEEDS]


def _recipe(method: str, density: float, arguments: dict[str, Any]) -> Recipe:
    if method == "dense":
        return recipe("topk", density=1.0)
    algorithm, _, form = method.partition(", ")
    if form == "scaled":
        arguments = arguments | {"feedback": ErrorFeedback(scale_residual=True)}
    if form == "best":
        arguments = arguments | {"feedback": BestFeedback()}
    return recipe(algorithm, density=density, **arguments)


def measure(name: str, task: Task | None = None, setting: dict[str, Any] = SETTING) -> Result:
    """Trains once."""
    schedule, how, method, seed = name.split("/")
    arguments, optimizer, rate, edit = REMEDIES.get(how, ({}, how, 0.0, None))
    last = setting["num_steps"] - 1
    trace = train(
        task or small_digits_task(),
        _recipe(method, setting["density"], arguments),
        size=setting["size"],
        num_steps=setting["num_steps"],
        learning_rate_at=lambda step: (rate or OPTIMIZERS[how][0]) * SCHEDULES[schedule](step / last),
        seed=int(seed.removeprefix("seed ")),
        make_optimizer=OPTIMIZERS[optimizer][1],
        edit=edit,
    )
    return {
        "accuracy": round(trace.score, 4),
        "final_loss": float(f"{np.mean(trace.losses[-20:]):.4g}"),
        "largest_applied": float(f"{max(trace.applied_norms):.4g}"),
        # means of about eight steps each: for the picture
        "losses": [
            float(f"{part.mean():.3g}")
            for part in np.array_split(np.array(trace.losses), max(1, len(trace.losses) // 8))
        ],
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


def remedies_table(result: dict[str, Any]) -> str:
    """What may help with momentum and restarts: accuracy, and points to dense with momentum."""
    dense, rows = of(result, "warm restarts", "momentum", "dense"), []
    for remedy in REMEDIES:
        found = [of(result, "warm restarts", _SAME.get(remedy, remedy), method) for method in METHODS[1:]]
        if all(found):
            rows.append([remedy, *(_against(runs, dense) for runs in found)])
    return markdown(["remedy", "topk", "exdyna"], rows)


STUDY = Study(
    "schedules",
    names,
    measure,
    lambda result: f"{table(result)}\n\n{remedies_table(result)}",
    facts={"setting": SETTING},
)
