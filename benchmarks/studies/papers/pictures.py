"""Pictures of docs/papers, all in one style: docs/pictures/papers/*.png."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.plans import PAPER
from benchmarks.studies.papers import counts, tables
from benchmarks.studies.study import MEASUREMENTS, PICTURES, load

#: told apart without color vision (Okabe and Ito), with markers beside
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = "os^Dvx"
GREY = "#777777"
#: ExDyna's density lies under MiCRO's
_WIDTHS = {"exdyna": 3.0}
FOLDER = PICTURES / "papers"

Panels = tuple[Figure, list[Any]]


def _panels(count: int, *, width: float = 8.0, height: float = 3.2) -> Panels:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(1, count)))
    for axis in axes:
        axis.grid(linewidth=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.xaxis.label.set_size(9)
        axis.yaxis.label.set_size(9)
    return figure, axes


def _titled(axis: Any, title: str, **labels: Any) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.set(**labels)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, frameon=False)


def measured(name: str) -> dict[str, Any]:
    """A committed measurement by its name."""
    return load(MEASUREMENTS / f"{name}.json")


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
    figure, (left, right) = _panels(2)
    _over_steps(left, result, "density", ["exdyna", "micro (parts stay)", "topk", "hard_threshold"])
    left.axhline(result["density"], color=GREY, linewidth=0.8, linestyle=":")
    _titled(left, "Fig. 6: density of the union", yscale="log", xlabel=_STEP)
    _over_steps(right, result, "imbalance", ["exdyna", "exdyna, rebalance=paper", "micro (parts stay)"])
    _titled(right, "Fig. 9: f(t); 1 is perfect balance", xlabel=_STEP)
    return figure


def threshold(result: dict[str, Any]) -> Figure:
    """ExDyna, Fig. 10."""
    figure, (axis,) = _panels(1, width=5.5)
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
    _titled(axis, "Fig. 10: threshold and global error", xlabel=_STEP)
    return figure


def errors(result: dict[str, Any]) -> Figure:
    """MiCRO, Fig. 2."""
    figure, (axis,) = _panels(1, width=5.5)
    _over_steps(axis, result, "global_error", ["micro (parts stay)", "topk", "hard_threshold"])
    _titled(axis, "Fig. 2: mean L2 norm of what ranks hold back", yscale="log", xlabel=_STEP)
    return figure


def iterations(result: dict[str, Any]) -> Figure:
    """OMGS-SGD, Table VI, with MG-WFBP."""
    figure, axes = _panels(4, height=2.8)
    tables = {row["model"]: row["strategies"] for row in measured("merging")["tables"] if row["size"] == 16}
    names = ["single", "fixed 8192", "omgs", "optimal"]
    for axis, model in zip(axes, counts.MODELS, strict=True):
        ours = [tables[model][name]["seconds"] for name in names]
        ours.append(result["merging"][model]["mgwfbp"]["seconds"])
        rows = np.arange(len(ours))
        axis.barh(rows, ours, height=0.6, color=COLORS[0], label="predicted here")
        theirs = [PAPER[model]["seconds"].get(name, np.nan) for name in names] + [np.nan]
        axis.plot(theirs, rows, "D", color=COLORS[1], markersize=6, label="the paper's, measured")
        limit = 1.4 * np.nanmax([*ours[:-1], *theirs])
        for row, value, other in zip(rows, ours, theirs, strict=True):
            words = f"{value:.2f} \N{RIGHTWARDS ARROW}" if value > limit else f"{value:.2f}"
            end = (0.98 * limit, row) if value > limit else (np.nanmax([value, other]), row)
            style = {"color": "white", "ha": "right"} if value > limit else {}
            axis.annotate(
                words, end, (5 * (not style), 0), textcoords="offset points", va="center", fontsize=8, **style
            )
        axis.set_title(model, fontsize=9, loc="left")
        axis.set_yticks(rows, [*names, "MG-WFBP"] if axis is axes[0] else [""] * len(rows), fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, limit)
    axes[0].set_xlabel("seconds of an iteration")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize=8, frameon=False
    )
    return figure


def encoding(result: dict[str, Any]) -> Figure:
    """DRAGONN, Figs. 1 and 5a."""
    figure, (axis,) = _panels(1, width=5.5)
    for number, (name, times) in enumerate(result["encoding_ms"].items()):
        sizes = [size / 2**20 for size in result["encoded_bytes"]]
        axis.plot(sizes, times, marker=MARKERS[number], markersize=4, color=COLORS[number], label=name)
    axis.set_xscale("log", base=2)
    _titled(
        axis,
        "Fig. 5a: fold and select 0.1 %, one core",
        yscale="log",
        xlabel="MiB of the gradient",
        ylabel="ms",
    )
    return figure


def methods(result: dict[str, Any]) -> Figure:
    """SparDL, Fig. 8: communication on eight hosts."""
    launches = [one for one in result["launches"] if one["network"] == "mpi"]
    figure, axes = _panels(len(launches), height=2.9)
    for axis, launch in zip(axes, launches, strict=True):
        rows = launch["results"]
        times = [1e3 * row["communication"]["seconds"]["median"] for row in rows]
        names = [row["method"].replace(":threshold_steps=4", "").replace(":teams", ", d") for row in rows]
        colors = [COLORS[0] if name.startswith("spardl") else GREY for name in names]
        axis.barh(np.arange(len(rows)), times, color=colors, height=0.65)
        for row, value in enumerate(times):
            axis.annotate(
                f"{value:.1f}", (value, row), (3, 0), textcoords="offset points", va="center", fontsize=8
            )
        axis.set_yticks(np.arange(len(rows)), names if axis is axes[0] else [""] * len(rows), fontsize=8)
        axis.invert_yaxis()
        _titled(
            axis,
            f"density {launch['density']:g}, eight hosts, MPI",
            xlabel="ms of communication",
            xlim=(0, 1.15 * max(times)),
        )
    return figure


def on_hosts(result: dict[str, Any]) -> Figure:
    """SparDL, Figs. 12 and 16, measured: communication by the number of workers and by density."""
    figure, axes = _panels(2)
    panels = ((result, "ranks", "workers"), (measured("paper_densities"), "density", "density"))
    for axis, (found, fact, label) in zip(axes, panels, strict=True):
        by_place = tables.launches_by(found, fact)
        for number, name in enumerate(("topk", "topk_dsa", "oktopk:threshold_steps=4", "spardl:teams=1")):
            points = [(place, 1e3 * row[name]) for place, row in by_place.items() if name in row]
            style = {"marker": MARKERS[number], "markersize": 4, "color": COLORS[number]}
            axis.plot(*zip(*points, strict=True), label=name.partition(":")[0], **style)
        _titled(axis, "ms of communication, measured", xlabel=label)
    axes[0].set(ylim=(0, None), xticks=sorted({launch["ranks"] for launch in result["launches"]}))
    axes[1].set(xscale="log", yscale="log")
    return figure


#: name of the picture: what it is made of, and what draws it
DRAWN: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "exdyna_density": ("papers", density),
    "exdyna_threshold": ("papers", threshold),
    "micro_errors": ("papers", errors),
    "omgs_iterations": ("paper_counts", iterations),
    "dragonn_encoding": ("papers", encoding),
    "spardl_methods": ("sparse_allreduce", methods),
    "spardl_on_hosts": ("paper_workers", on_hosts),
}


def draw_all() -> None:
    """Every picture, of the committed numbers."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (measurement, make) in DRAWN.items():
        make(measured(measurement)).savefig(FOLDER / f"{name}.png", dpi=110, metadata={"Software": None})
