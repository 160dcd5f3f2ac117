"""Pictures of docs/appendix/papers.md."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.report.pictures import COLORS, GREY, panels, titled

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
    """Draws ExDyna's Figs. 6 and 9."""
    figure, (left, right) = panels(2)
    _over_steps(left, result, "density", ["exdyna", "micro (parts stay)", "topk", "hard_threshold"])
    left.axhline(result["density"], color=GREY, linewidth=0.8, linestyle=":")
    titled(left, "Fig. 6: density of the union", yscale="log", xlabel=_STEP)
    _over_steps(right, result, "imbalance", ["exdyna", "exdyna, rebalance=paper", "micro (parts stay)"])
    titled(right, "Fig. 9: f(t); 1 is perfect balance", xlabel=_STEP)
    return figure


def errors(result: dict[str, Any]) -> Figure:
    """Draws MiCRO's Fig. 2."""
    figure, (axis,) = panels(1, width=5.5)
    _over_steps(axis, result, "global_error", ["micro (parts stay)", "topk", "hard_threshold"])
    titled(axis, "Fig. 2: mean L2 norm of what ranks hold back", yscale="log", xlabel=_STEP)
    return figure
