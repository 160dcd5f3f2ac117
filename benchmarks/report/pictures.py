"""The pictures of docs: each is a figure, made of a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.studies import convergence, slow_links

#: told apart without color vision (Okabe and Ito), with markers beside
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = "os^Dvx"
GREY = "#777777"


def panels(count: int, *, width: float = 8.0, height: float = 3.2) -> tuple[Figure, list[Any]]:
    """A figure of so many panels side by side."""
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


def titled(axis: Any, title: str, **labels: Any) -> None:
    """Gives a panel its title, and a legend where it needs one."""
    axis.set_title(title, fontsize=10, loc="left")
    axis.set(**labels)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, frameon=False)


def rows(axis: Any, names: list[str]) -> None:
    """Names rows from the top."""
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()


def beside(axis: Any, words: str, value: float, row: float, **style: Any) -> None:
    """Writes behind the end of a bar or a dot."""
    where = {"textcoords": "offset points", "va": "center", "fontsize": 8}
    axis.annotate(words, (value, row), (6, 0), **where | style)


def seconds_of(launch: Mapping[str, Any]) -> dict[str, float]:
    """Median iteration by method."""
    return {item["method"]: item["seconds"]["median"] for item in launch["results"]}


def bandwidth(result: Mapping[str, Any]) -> Figure:
    """How many times faster an iteration is, against the network's bandwidth."""
    figure, (axis,) = panels(1, height=3.9)
    times = [seconds_of(launch) for launch in result["launches"]]
    (name,) = [method for method in times[0] if method != "dense"]
    rates = [launch["rate"].replace("bit", "bit/s") for launch in result["launches"]]
    ratios = [one["dense"] / one[name] for one in times]
    axis.plot(rates, ratios, "o", color=COLORS[1], markersize=9)
    for place, (one, ratio) in enumerate(zip(times, ratios, strict=True)):
        words = f"{ratio:.1f} x\n{1e3 * one['dense']:,.0f} → {1e3 * one[name]:,.0f} ms"
        beside(axis, words, place, ratio)
    axis.axhline(1.0, color=GREY, linewidth=1)
    size, model = result["launches"][0]["ranks"], result["model"].replace("resnet", "ResNet-")
    recipe = result["launches"][0]["sparsifiers"][name]
    title = f"A step of {model} on {size} hosts, {recipe}: times faster than dense (float32)"
    titled(axis, title, ylim=(0, None), xlim=(-0.3, len(rates) - 0.3))
    return figure


def synchronization(result: Mapping[str, Any]) -> Figure:
    """One synchronization by every method, on a logarithmic axis; each launch of a method has a dot."""
    found: dict[str, list[tuple[dict[str, float], float]]] = {}
    for launch in result["launches"]:
        dense = seconds_of(launch)["dense"]
        for item in launch["results"]:
            found.setdefault(item["method"], []).append((item["seconds"], dense))
    order = sorted(found, key=lambda name: min(seconds["median"] for seconds, _ in found[name]))
    figure, (axis,) = panels(1, height=0.9 + 0.3 * len(order))
    for row, name in enumerate(order):
        color = GREY if name in ("dense", "dense float16", "naive") else COLORS[0]
        for seconds, _ in found[name]:
            axis.plot([1e3 * seconds["low"], 1e3 * seconds["high"]], [row, row], color=GREY, linewidth=2)
            axis.plot(1e3 * seconds["median"], row, "o", color=color, markersize=7)
        seconds, dense = found[name][0]
        end = 1e3 * max(seconds["high"] for seconds, _ in found[name])
        beside(axis, f"{dense / seconds['median']:.1f} x", end, row)
    rows(axis, order)
    launch, millions = result["launches"][0], result["elements"] / 1e6
    title = f"{launch['ranks']} hosts, {launch['rate']}, {launch['network']}, {millions:g} million parameters"
    label = "milliseconds, median and quartiles; beside it: times faster than dense in the same launch"
    titled(
        axis,
        f"{title}, density {result['density']}",
        xscale="log",
        xlabel=label,
    )
    axis.set_xticks([20, 50, 100, 200, 500, 1000, 2000, 5000])
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.minorticks_off()
    return figure


def accuracies(result: Mapping[str, Any]) -> Figure:
    """Accuracy of every sparsifier, all seeds, and the band of one point below dense."""
    facts = convergence.summary(dict(result))
    order = [name for name in convergence.variants() if name in facts]
    order = [name for name in order if convergence.dense_beside(name) == "none"]
    figure, (axis,) = panels(1, height=0.3 * len(order) + 1.2)
    dense = 100 * facts["none"]["mean"]
    axis.axvspan(dense - 1.0, dense, color=COLORS[0], alpha=0.12, label="within 1 point of dense")
    for row, variant in enumerate(order):
        own = [run for name, run in result["runs"].items() if name.startswith(f"{variant}/")]
        seeds = [100 * run["accuracy"] for run in own if not run.get("diverged")]
        mean = float(np.mean(seeds))
        if mean < dense - 3.0:  # far off: said, not drawn, so that the others can be told apart
            beside(axis, f"{mean:.1f} %", dense - 3.0, row, color=COLORS[5])
            continue
        axis.plot(seeds, [row] * len(seeds), "o", color=GREY, markersize=4)
        axis.plot([mean], [row], "|", color=COLORS[5], markersize=14, markeredgewidth=2)
    rows(axis, order)
    titled(axis, "", xlim=(dense - 3.0, dense + 1.5), xlabel="test accuracy, % (dots: seeds; bar: mean)")
    return figure


def bits_over_seconds(result: Mapping[str, Any]) -> Figure:
    """Smooth bits of a GPT over seconds, a panel per cell."""
    cells = slow_links.measured(result)
    figure, axes = panels(len(cells), width=4.2 * len(cells), height=3.4)
    for axis, (cell, runs) in zip(axes, cells.items(), strict=True):
        target = slow_links.smooth(runs[slow_links.DENSE])[-1] + slow_links.NOISE
        for name, run in runs.items():
            known = {slow_links.DENSE: GREY, slow_links.POWER: COLORS[3], slow_links.LOCAL: COLORS[2]}
            color, bits, clock = known.get(name, COLORS[0]), slow_links.smooth(run), slow_links.clock_of(run)
            axis.plot(clock[len(clock) - len(bits) :], bits, color=color, label=name)
            if np.isfinite(until := slow_links.seconds_to(run, target)):
                axis.plot([until], [target], "o", color=color)
                axis.annotate(f"{until:.0f} s", (until, target), (-9, -13), textcoords="offset points")
        axis.axhline(target, color=GREY, linewidth=0.8, linestyle=":")
        titled(axis, cell, xlabel="seconds of training", xscale="log", ylim=(target - 0.4, 5))
        axis.xaxis.set_minor_formatter(lambda value, place: "")
    axes[0].set_ylabel("bits per byte")
    return figure
