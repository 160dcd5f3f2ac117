"""Pictures of docs/appendix/papers.md."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.report.pictures import COLORS, GREY, MARKERS, panels, titled

#: ExDyna's density lies under MiCRO's
_WIDTHS = {"exdyna": 3.0}


def _over_steps(axis: Any, result: dict[str, Any], what: str, names: list[str]) -> None:
    order = list(result["runs"])
    for name in names:
        values = [np.nan if value is None else value for value in result["runs"][name][what]]
        color = COLORS[order.index(name)]
        axis.plot(
            np.arange(1, len(values) + 1), values, color=color, linewidth=_WIDTHS.get(name, 1.3), label=name
        )
    axis.axvline(result["drop_at"] + 1, color=GREY, linewidth=0.8, linestyle=":")


_STEP = "step; the learning rate falls at the dotted line"


def density(result: dict[str, Any]) -> Figure:
    """ExDyna, Figs. 6 and 9."""
    figure, (left, right) = panels(2)
    _over_steps(left, result, "density", ["exdyna", "micro (parts stay)", "topk", "hard_threshold"])
    left.axhline(result["density"], color=GREY, linewidth=0.8, linestyle=":")
    titled(left, "Fig. 6: density of the union", yscale="log", xlabel=_STEP)
    _over_steps(right, result, "imbalance", ["exdyna", "exdyna, rebalance=paper", "micro (parts stay)"])
    titled(right, "Fig. 9: f(t); 1 is perfect balance", xlabel=_STEP)
    return figure


def threshold(result: dict[str, Any]) -> Figure:
    """ExDyna, Fig. 10."""
    figure, (axis,) = panels(1, width=5.5)
    run, first = result["runs"]["exdyna"], result["warmup_steps"]
    found = np.array(run["thresholds"][first:], float)
    error = np.array(run["global_error"][first:], float)
    steps = np.arange(first + 1, first + len(found) + 1)
    axis.plot(
        steps,
        error * np.nansum(found) / np.nansum(error),
        color=COLORS[1],
        linewidth=3,
        label="global error, scaled",
    )
    axis.plot(steps, found, color=COLORS[0], linewidth=1.2, label="threshold")
    axis.axvline(result["drop_at"] + 1, color=GREY, linewidth=0.8, linestyle=":")
    titled(axis, "Fig. 10: threshold and global error", xlabel=_STEP)
    return figure


def errors(result: dict[str, Any]) -> Figure:
    """MiCRO, Fig. 2."""
    figure, (axis,) = panels(1, width=5.5)
    _over_steps(axis, result, "global_error", ["micro (parts stay)", "topk", "hard_threshold"])
    titled(axis, "Fig. 2: mean L2 norm of what ranks hold back", yscale="log", xlabel=_STEP)
    return figure


def encoding(result: dict[str, Any]) -> Figure:
    """DRAGONN, Figs. 1 and 5a."""
    figure, (axis,) = panels(1, width=5.5)
    for number, (name, times) in enumerate(result["encoding_ms"].items()):
        sizes = [size / 2**20 for size in result["encoded_bytes"]]
        axis.plot(sizes, times, marker=MARKERS[number], markersize=4, color=COLORS[number], label=name)
    axis.set_xscale("log", base=2)
    titled(
        axis,
        "Fig. 5a: fold and select 0.1 %, one core",
        yscale="log",
        xlabel="MiB of the gradient",
        ylabel="ms",
    )
    return figure
