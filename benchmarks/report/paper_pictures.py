"""Pictures of docs/papers.md."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.plans import PAPER
from benchmarks.report.pictures import COLORS, GREY, MARKERS, beside, panels, rows, titled
from benchmarks.studies.papers import counts, tables
from benchmarks.studies.study import measured

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


def iterations(result: dict[str, Any]) -> Figure:
    """OMGS-SGD, Table VI, with MG-WFBP."""
    figure, axes = panels(4, height=2.8)
    tables = {row["model"]: row["strategies"] for row in measured("merging")["tables"] if row["size"] == 16}
    names = ["single", "fixed 8192", "omgs", "optimal"]
    for axis, model in zip(axes, counts.MODELS, strict=True):
        ours = [tables[model][name]["seconds"] for name in names]
        ours.append(result["merging"][model]["mgwfbp"]["seconds"])
        places = np.arange(len(ours))
        axis.barh(places, ours, height=0.6, color=COLORS[0], label="predicted here")
        theirs = [PAPER[model]["seconds"].get(name, np.nan) for name in names] + [np.nan]
        axis.plot(theirs, places, "D", color=COLORS[1], markersize=6, label="the paper's, measured")
        limit = 1.4 * np.nanmax([*ours[:-1], *theirs])
        for row, (value, other) in enumerate(zip(ours, theirs, strict=True)):
            if value > limit:  # MG-WFBP's dense times are too long for an axis of the others
                beside(axis, f"{value:.2f} →", 0.9 * limit, row, color="white", ha="right")
            else:
                beside(axis, f"{value:.2f}", float(np.nanmax([value, other])), row)
        titled(axis, model, xlim=(0, limit))
        axis.legend().remove()
        rows(axis, [*names, "MG-WFBP"] if axis is axes[0] else [""] * len(ours))
    axes[0].set_xlabel("seconds of an iteration")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize=8, frameon=False
    )
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


def methods(result: dict[str, Any]) -> Figure:
    """SparDL, Fig. 8: communication on eight hosts."""
    launches = [one for one in result["launches"] if one["network"] == "mpi"]
    figure, axes = panels(len(launches), height=2.9)
    for axis, launch in zip(axes, launches, strict=True):
        times = [1e3 * row["communication"]["seconds"]["median"] for row in launch["results"]]
        names = [row["method"].partition(":threshold")[0] for row in launch["results"]]
        names = [name.replace(":teams", ", d") for name in names]
        colors = [COLORS[0] if name.startswith("spardl") else GREY for name in names]
        axis.barh(np.arange(len(times)), times, color=colors, height=0.65)
        for row, value in enumerate(times):
            beside(axis, f"{value:.1f}", value, row)
        rows(axis, names if axis is axes[0] else [""] * len(names))
        titled(
            axis,
            f"density {launch['density']:g}, eight hosts, MPI",
            xlabel="ms of communication",
            xlim=(0, 1.15 * max(times)),
        )
    return figure


def on_hosts(result: dict[str, Any]) -> Figure:
    """SparDL, Figs. 12 and 16, measured: communication by the number of workers and by density."""
    figure, axes = panels(2)
    shown = ((result, "ranks", "workers"), (measured("paper_densities"), "density", "density"))
    for axis, (found, fact, label) in zip(axes, shown, strict=True):
        by_place = tables.launches_by(found, fact)
        for number, name in enumerate(("topk", "topk_dsa", "oktopk:threshold_steps=4", "spardl:teams=1")):
            points = [(place, 1e3 * row[name]) for place, row in by_place.items() if name in row]
            style = {"marker": MARKERS[number], "markersize": 4, "color": COLORS[number]}
            axis.plot(*zip(*points, strict=True), label=name.partition(":")[0], **style)
        titled(axis, "ms of communication, measured", xlabel=label)
    axes[0].set(ylim=(0, None), xticks=sorted({launch["ranks"] for launch in result["launches"]}))
    axes[1].set(xscale="log", yscale="log")
    return figure
