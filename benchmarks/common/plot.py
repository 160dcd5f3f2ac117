"""Pictures of measurements across hosts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

#: parts in the order in which they are stacked, with a color each that is told apart without color vision
_COLORS = {
    "forward": "#999999",
    "backward": "#666666",
    "fold": "#0072B2",
    "select": "#56B4E9",
    "exchange": "#E69F00",
    "apply": "#009E73",
    "step": "#CC79A7",
    "other": "#DDDDDD",
}
#: a bar this many times longer than the shortest of all is named in numbers, not drawn to its end
_TOO_LONG = 6.0


def plot_parts(result: Mapping[str, Any], target: Path) -> None:
    """One stacked bar per method: where the time of a rank goes, one panel per launch.

    Args:
        result: of `scripts/bench sync` or `scripts/bench train`.
        target: file; its ending says the format.
    """
    launches = result["launches"]
    rows = max(len(launch["results"]) for launch in launches)
    figure, axes = plt.subplots(
        len(launches), 1, figsize=(8, len(launches) * (1.4 + 0.3 * rows)), squeeze=False, layout="constrained"
    )
    totals = [total for launch in launches for total in _totals(launch)]
    limit = 1.12 * max(total for total in totals if total <= _TOO_LONG * min(totals))
    for axis, launch in zip(axes[:, 0], launches, strict=True):
        _bars(axis, launch, limit)
        title = f"{launch['ranks']} hosts, {launch['rate']}, {launch['network']}"
        axis.set_title(title, fontsize=10, loc="left")
    figure.savefig(target, dpi=130)
    plt.close(figure)


def _totals(launch: Mapping[str, Any]) -> list[float]:
    return [1e3 * sum(item["parts"].values()) for item in launch["results"]]


def _bars(axis: Any, launch: Mapping[str, Any], limit: float) -> None:
    items = launch["results"]
    names = [item["method"] for item in items]
    totals = _totals(launch)
    present = [name for name in _COLORS if any(name in item["parts"] for item in items)]
    starts = [0.0] * len(items)
    for part in present:
        widths = [1e3 * item["parts"].get(part, 0.0) for item in items]
        axis.barh(names, widths, left=starts, color=_COLORS[part], label=part, height=0.7)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, total in enumerate(totals):
        cut = total > limit
        axis.text(
            limit * 0.99 if cut else total + 0.01 * limit,
            row,
            f"{total:,.0f} ms →" if cut else f"{total:,.0f}",
            va="center",
            ha="right" if cut else "left",
            fontsize=8,
        )
    axis.set_xlim(0, limit)
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds, mean of the ranks", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7, ncols=len(present), loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
