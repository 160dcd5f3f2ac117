"""The pictures of docs: each is a figure, made of a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.studies import lengths, local, passes
from benchmarks.studies.study import at_best_rate, behind

#: told apart without color vision (Okabe and Ito), with markers beside
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = "os^Dvx"
GREY = "#777777"


def panels(count: int, *, width: float = 8.0, height: float = 3.2) -> tuple[Figure, list[Any]]:
    """Returns a figure with `count` panels side by side."""
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


def beside(axis: Any, words: str, value: float, row: float, **style: Any) -> None:
    """Writes behind the end of a bar or a dot."""
    where = {"textcoords": "offset points", "va": "center", "fontsize": 8}
    axis.annotate(words, (value, row), (6, 0), **where | style)


def seconds_of(launch: Mapping[str, Any]) -> dict[str, float]:
    """Returns the median seconds of an iteration, by method."""
    return {item["method"]: item["seconds"]["median"] for item in launch["results"]}


def bandwidth(result: Mapping[str, Any]) -> Figure:
    """Draws how many times faster an iteration is, over the network's bandwidth."""
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
    """Draws one synchronization's seconds by every method, on a logarithmic axis, a dot per launch."""
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
    axis.set_yticks(range(len(order)), order, fontsize=8)
    axis.invert_yaxis()
    launch, millions = result["launches"][0], result["elements"] / 1e6
    title = f"{launch['ranks']} hosts, {launch['rate']}, {launch['network']}, {millions:g} million parameters"
    label = "milliseconds, median and quartiles; beside it: times faster than dense in the same launch"
    titled(axis, f"{title}, density {result['density']}", xscale="log", xlabel=label)
    axis.set_xticks([20, 50, 100, 200, 500, 1000, 2000, 5000])
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.minorticks_off()
    return figure


#: words in the picture -> rows of the two studies, some of many
_EVERY_STEP = {"best, 1 %": "topk 1 %, adam", "best, 0.3 %, 2 bits": "topk 0.3 %, 2 bits, gaps, adam"}
_EVERY_STEP |= {"AdamW behind top-k, 1 %": "topk 1 %, error", "float16": "fp16", "DeMo": "demo"}
_EVERY_STEP |= {"1-bit Adam": "1-bit adam", "PowerSGD": "powersgd rank 4", "QSGD": "qsgd"}
_RARE = {"DiLoCo": "DiLoCo, H = 30, dense", "5 steps late": "the same, 5 steps late"}
_RARE |= {"SparseLoCo": "sparseloco, H = 30, by senders, outer rate 1.5"}


def frontier(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws bits per byte beside dense training's over bytes sent, with and without local steps."""
    figure, (axis,) = panels(1, height=4.2)
    groups = (
        ("in every step: GPT of 0.48 M, 400 steps, 2 ranks", "P=2, ", "dense", _EVERY_STEP),
        ("every 30 steps: GPT of 0.83 M, 3,000 steps, 4 ranks", "", next(iter(local.METHODS)), _RARE),
    )
    for number, ((label, start, dense, rows), result) in enumerate(zip(groups, found, strict=True)):
        points = []
        for words, row in rows.items():
            bits = fmean(behind(result["runs"], start + row, start + dense, "training_bits"))
            _, runs = at_best_rate(result["runs"], start + row) or (0.0, {})
            points.append((4 * runs[0]["num_elements"] / runs[0]["bytes_per_step"], bits))
            axis.annotate(words, points[-1], (6, 3), textcoords="offset points", fontsize=8)
        axis.plot(*zip(*points, strict=True), MARKERS[number], color=COLORS[number], label=label)
    axis.axhline(0.0, color=GREY, linewidth=0.8)
    axis.set(xlabel="times fewer bytes than dense", ylabel="bits per byte minus dense; less is better")
    axis.set(xscale="log", xlim=(1, 3e4), ylim=(-0.25, 1.1))
    titled(axis, "After equal steps, each at the best rate tried")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.minorticks_off()
    return figure


def densities(result: Mapping[str, Any]) -> Figure:
    """Draws bits per byte beside dense training's over density: a line per length, a panel per task."""
    drawn = []
    for task, steps in lengths.CELLS:
        dense, points = lengths.row(task, steps, "dense"), []
        for density in sorted(lengths.densities(steps)):
            name = lengths.row(task, steps, f"{100 * density:g} %")
            training, held_out = (behind(result["runs"], name, dense, score) for score in lengths.SCORES)
            points += [(100 * density, fmean(training), fmean(held_out))] if training else []
        drawn += [(task, steps, points)] if points else []
    tasks = list(dict.fromkeys(task for task, _, _ in drawn))
    figure, axes = panels(len(tasks), width=max(5.5, 3.6 * len(tasks)), height=3.6)
    for task, steps, points in drawn:
        axis, color = axes[tasks.index(task)], COLORS[sorted({one[1] for one in drawn}).index(steps)]
        percent = [one[0] for one in points]
        axis.plot(percent, [one[1] for one in points], "o-", color=color, label=f"{steps:,} steps")
        axis.plot(percent, [one[2] for one in points], "o--", color=color, markersize=3, linewidth=1)
    for axis, task in zip(axes, tasks, strict=True):
        axis.axhline(0.0, color=GREY, linewidth=0.8)
        titled(axis, task, xscale="log", xlabel="density, %")
        axis.xaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("bits per byte minus dense\n(dashed: held-out text)")
    return figure


def late_or_rare(result: Mapping[str, Any]) -> Figure:
    """Draws scores of late and rare exchanges over the number of ranks, and of momentum over density."""
    figure, axes = panels(3, width=10.5, height=3.4)

    def scores(task: str, size: int, method: str, score: str) -> list[float]:
        runs, dense = result["runs"], passes.row(task, size, "dense")
        (rate,) = passes.best_rate(runs, dense, passes.TASKS[task][1])
        name = passes.row(task, size, method)
        return [runs[f"{name}/rate {rate:g}/seed {seed}"][score] for seed in passes.SEEDS]

    sizes = [size for task, size in passes.CELLS if task == "gpt"]
    for number, method in enumerate(name for name in passes.METHODS if name.startswith("1 %")):
        more = [[scores("gpt", size, name, "training") for name in (method, "dense")] for size in sizes]
        words, style = method.removeprefix("1 %, ").replace("1 %", "every=1"), f"{MARKERS[number]}-"
        axes[0].plot(sizes, [fmean(a) - fmean(b) for a, b in more], style, color=COLORS[number], label=words)
    axes[0].axhline(0.0, color=GREY, linewidth=0.8)
    titled(axes[0], "GPT, AdamW, 1 %: bits minus dense", xlabel="ranks", xticks=sizes)
    for axis, task, name in zip(axes[1:], ("cnn", "resnet"), ("CNN", "ResNet-20"), strict=True):
        axis.axhline(fmean(scores(task, 2, "dense", "test")), color=GREY, label="dense")
        for number, (late, shown) in enumerate({"": (25, 5, 1, 0.3), ", delay=1": (1, 0.3)}.items()):
            means = [fmean(scores(task, 2, f"{density:g} %{late}", "test")) for density in shown]
            words = late.removeprefix(", ") or "delay=0"
            axis.plot(shown, means, f"{MARKERS[number]}-", color=COLORS[number], label=words)
        titled(axis, f"{name}, momentum: accuracy", xscale="log", xlabel="density, %")
        axis.xaxis.set_major_formatter("{x:g}")
    return figure
