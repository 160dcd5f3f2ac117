"""The picture of the threshold study."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies import results

__all__ = ["draw"]

_TASKS = {"digits": "CNN on digits", "text": "LSTM on source text"}
#: colours that differ in lightness, too
_PAPER, _SKETCH, _OTHER = "#c44e00", "#1f5fbf", "#7a7a7a"


def draw(result: dict[str, Any]) -> None:
    """Draws what is there; a run that is missing leaves its line out."""
    results.PICTURES.mkdir(parents=True, exist_ok=True)
    figure = _densities(result)
    figure.savefig(results.PICTURES / "threshold_density.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def _steps(values: list[Any]) -> np.ndarray:
    return np.arange(1, len(values) + 1)


def _marks(axes: Axes, setting: dict[str, Any]) -> None:
    """Where warm-up ends, and where the learning rate falls."""
    for step in (setting["warmup_steps"], setting["drop_at"]):
        axes.axvline(step + 1, color="black", linewidth=0.6, linestyle=":")
    axes.grid(True, which="major", linewidth=0.3)


def _densities(result: dict[str, Any]) -> Figure:
    figure, grid = plt.subplots(2, 2, figsize=(11, 7), sharex=True, sharey="row", layout="constrained")
    for row, (task, title) in zip(grid, _TASKS.items(), strict=True):
        for axes, algorithm in zip(row, ("exdyna", "micro"), strict=True):
            for rule, color, width in (("paper", _PAPER, 1.2), ("sketch", _SKETCH, 1.2)):
                run = result["runs"].get(f"{task}/{algorithm} {rule}")
                if run is None:
                    continue
                density = np.array(run["counts"], float) / run["num_elements"]
                density[density == 0.0] = np.nan  # an empty union has no place on a logarithmic axis
                axes.plot(_steps(run["counts"]), density, color=color, linewidth=width, label=rule)
                asked = np.array(run["targets"]) / run["num_elements"]
            axes.plot(_steps(asked), asked, color="black", linewidth=0.9, linestyle="--", label="asked")
            axes.set_yscale("log")
            axes.set_title(f"{algorithm}, {title}", fontsize=10)
            _marks(axes, result["settings"][task])
        row[0].set_ylabel("density of the union")
    for axes in grid[-1]:
        axes.set_xlabel("step (dotted: warm-up ends; learning rate x 0.1)")
    grid[0, 0].legend(fontsize=9)
    return figure
