"""Simulated steps as a picture: time and bytes over the number of ranks, and where dense wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from horovod_sparse.cli.simulate.study import Crossing, Question, Study

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#7A4FB5")
_DENSE, _INK = "#8C8C8C", "#333333"


def draw_studies(question: Question, studies: Sequence[Study]) -> Any:
    """Four panels: seconds and bytes by P; speedup over dense by density and by bandwidth.

    Args:
        question: what was simulated.
        studies: one line each.

    Returns:
        A figure of matplotlib; every line's gid is the sparsifier's description, or "dense".
    """
    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7.2), layout="constrained")
    (seconds, sent), (density, bandwidth) = axes
    longest = max(studies, key=lambda study: len(study.points)).points
    sizes = [point.size for point in longest]
    dense_ms = [1e3 * point.dense_seconds for point in longest]
    dense_bytes = [point.dense_bytes_per_rank for point in longest]
    look = {"color": _DENSE, "linestyle": (0, (4, 2)), "linewidth": 1.6, "gid": "dense", "label": "dense"}
    seconds.plot(sizes, dense_ms, **look)
    sent.plot(sizes, dense_bytes, **look)
    for axis in (density, bandwidth):
        axis.set_xscale("log")
        axis.set_yscale("log")
    for number, study in enumerate(studies):
        name, color = study.recipe.describe(), _COLORS[number % len(_COLORS)]
        line = {"color": color, "marker": "o", "markersize": 4, "linewidth": 1.6, "gid": name, "label": name}
        sizes_ = [point.size for point in study.points]
        seconds.plot(sizes_, [1e3 * point.sparse_seconds for point in study.points], **line)
        sent.plot(sizes_, [point.bytes_per_rank for point in study.points], **line)
        line = {"color": color, "linewidth": 1.6, "gid": name}
        _speedup(density, study.density, line)
        _speedup(bandwidth, study.bandwidth, line)
    _label(seconds, "time of a step", "ranks", "milliseconds")
    _label(sent, "what a rank puts in per step", "ranks", "bytes")
    for axis in (seconds, sent):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        _label_values(axis)
    _label(density, f"speedup over dense, {question.at} ranks", "density", "times")
    _label(bandwidth, f"speedup over dense, {question.at} ranks", "bandwidth", "times")
    bandwidth.set_xticks([1e6, 1e8, 1e9, 1e10, 1e12], ["1 M", "100 M", "1 G", "10 G", "1 Tbit/s"])
    handles, labels = seconds.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8.5, frameon=False)
    return figure


def _speedup(axis: Any, crossing: Crossing | None, line: dict[str, Any]) -> None:
    """A speedup's curve, with a dot where it passes 1."""
    if crossing is None:
        return
    axis.plot([value for value, _ in crossing.curve], [times for _, times in crossing.curve], **line)
    for value in crossing.values:
        axis.plot([value], [1.0], marker="o", markersize=6, color=line["color"], gid="crossing")


def _label(axis: Any, title: str, below: str, beside: str) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel(below, fontsize=9)
    axis.set_ylabel(beside, fontsize=9)
    axis.tick_params(labelsize=8.5)
    axis.grid(color="#E8E8E8", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)
    if beside == "times":
        _label_values(axis)
        axis.axhline(1.0, color=_INK, linewidth=0.9, linestyle=(0, (3, 2)))
        axis.annotate(
            "dense wins below",
            (0.015, 1.0),
            xycoords=("axes fraction", "data"),
            xytext=(0, -9),
            textcoords="offset points",
            fontsize=7.5,
            color=_INK,
        )


def _label_values(axis: Any) -> None:
    """Labels on a logarithmic axis, also where its values lie within one decade: at 1, 2, and 5 of each."""
    low, high = axis.get_ylim()
    subs: tuple[float, ...] = (1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,)
    if high / low < 5:  # steps of 1 and 2 may both lie outside
        subs = tuple(1 + number / 4 for number in range(36))
    axis.yaxis.set_major_locator(LogLocator(subs=subs))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:.4g}" if value < 1e4 else f"{value:.0e}".replace("e+0", "e"))
    )
