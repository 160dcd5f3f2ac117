"""Scores over seconds: a row per model, a column per rate of the network."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.studies.time_to_accuracy.curves import (
    DENSE,
    SCORES,
    gigabits,
    over_seconds,
    reached,
    targets_of,
)

#: colours that are told apart without red and green (Okabe and Ito), and kinds of lines
_STYLES: dict[str, tuple[str, Any]] = {
    "dense": ("#000000", "-"),
    "dense, DDP": ("#777777", (0, (4, 2))),
    "fp16": ("#777777", (0, (1, 1.2))),
    "topk": ("#0072B2", "-"),
    "exdyna": ("#D55E00", "-"),
    "spardl": ("#009E73", "-"),
    "dragonn": ("#E69F00", "-"),
    "dgc": ("#56B4E9", "-"),
    "topk, best": ("#0072B2", (0, (4, 2))),
    "PowerSGD": ("#CC79A7", (0, (5, 1.5))),
}
#: how much worse than the target an axis goes, in units of the score
_WORSE = {True: 0.5, False: 2.5}


def draw(result: dict[str, Any], path: Path) -> None:
    """Curves up to the end of dense training's, and a list of who reaches the targets when.

    Args:
        result: of the study.
        path: of the picture.
    """
    rates = result["rates"]
    models = [model for model in SCORES if targets_of(result, model)]
    figure, grid = plt.subplots(
        len(models), len(rates), figsize=(5.6 * len(rates), 3.1 * len(models)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for row, model in zip(grid, models, strict=True):
        for axes, rate in zip(row, rates, strict=True):
            _panel(axes, result, model, rate)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _panel(axes: Any, result: dict[str, Any], model: str, rate: str) -> None:
    score, targets = SCORES[model], targets_of(result, model)
    found: list[tuple[list[float], str]] = []
    last = 0.0
    for method, (color, line) in _STYLES.items():
        curve = over_seconds(result, model, rate, method)
        if curve is None:
            continue
        if method == DENSE:
            last = curve[-1][0]
        seconds, scores = zip(*curve, strict=True)
        axes.plot(
            seconds, [score.factor * value for value in scores], color=color, linestyle=line, linewidth=1.6
        )
        places = [reached(curve, target, score.higher) for target in targets]
        found.append(([math.inf if place is None else place for place in places], method))
        for place, target in zip(places, targets, strict=True):
            if place is not None:
                axes.plot([place], [score.factor * target], "o", color=color, markersize=5, zorder=3)
    for target in targets:
        axes.axhline(score.factor * target, color="#999999", linewidth=0.8)
    axes.set_title(f"{score.words}; {gigabits(rate)}", fontsize=11, loc="left")
    axes.set_xlabel("seconds", fontsize=10)
    axes.set_ylabel(score.name, fontsize=10)
    if last:
        axes.set_xlim(0, 1.02 * last)
    if score.higher:
        axes.set_ylim(bottom=score.factor * max(0.0, targets[0] - _WORSE[True]))
    else:
        axes.set_ylim(targets[1] - 0.3, targets[0] + _WORSE[False])
    axes.grid(True, linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    head = "s to " + " / ".join(score.shown.format(target) for target in targets)
    axes.text(1.02, 1.0, head, transform=axes.transAxes, fontsize=9.5, va="top", color="#444444")
    for number, (times, method) in enumerate(sorted(found, key=lambda item: item[0]), 1):
        color, line = _STYLES[method]
        height = 1.0 - 0.1 * number
        axes.plot(
            [1.02, 1.08], [height - 0.035] * 2, color=color, linestyle=line, linewidth=1.8,
            transform=axes.transAxes, clip_on=False,
        )  # fmt: skip
        shown = " / ".join("never" if place == math.inf else f"{place:.1f}" for place in times)
        axes.text(1.09, height, f"{method} {shown}", transform=axes.transAxes, fontsize=9.5, va="top")
