"""Pictures that `scripts/report` draws of measurements across hosts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

_UNITS = {"mbit": 1e6, "gbit": 1e9}
_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#999999"


def bits_per_second(rate: str) -> float:
    """A rate as `scripts/cluster` takes it.

    Example:
        >>> bits_per_second("250mbit"), bits_per_second("2.5gbit")
        (250000000.0, 2500000000.0)
    """
    return next(float(rate.removesuffix(unit)) * factor for unit, factor in _UNITS.items() if unit in rate)


def seconds_of(launch: Mapping[str, Any]) -> dict[str, float]:
    """Median iteration by method."""
    return {item["method"]: item["seconds"]["median"] for item in launch["results"]}


def plot_bandwidth(result: Mapping[str, Any], target: Path) -> None:
    """How many times faster an iteration is, against the network's bandwidth: measured.

    Args:
        result: of `scripts/bench train --rate ...` with several rates, "dense" and one sparsifier.
        target: file; its ending says the format.
    """
    (name,) = [method for method in seconds_of(result["launches"][0]) if method != "dense"]
    launches = result["launches"]
    size, recipe = launches[0]["ranks"], launches[0]["sparsifiers"][name]
    figure, axis = plt.subplots(figsize=(8, 3.9), layout="constrained")
    points = [(bits_per_second(launch["rate"]), seconds_of(launch)) for launch in launches]
    ratios = [times["dense"] / times[name] for _, times in points]
    axis.plot(
        [rate for rate, _ in points],
        ratios,
        "o",
        color=_ORANGE,
        markersize=9,
        label=f"measured, {size} hosts on {result['machine']['cores']} cores",
    )
    for (rate, times), ratio in zip(points, ratios, strict=True):
        words = f"{ratio:.1f} x\n{1e3 * times['dense']:,.0f} → {1e3 * times[name]:,.0f} ms"
        axis.annotate(
            words, (rate, ratio), (-9, 2), textcoords="offset points", ha="right", va="top", fontsize=8
        )
    axis.axhline(1.0, color=_GREY, linewidth=1)
    axis.annotate(
        "as fast as dense", (1.6e8, 1.0), (0, 4), textcoords="offset points", fontsize=8, color=_GREY
    )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(1.5e8, 3e9)
    axis.set_xticks([2.5e8, 5e8, 1e9, 2e9], ["250 Mbit/s", "500 Mbit/s", "1 Gbit/s", "2 Gbit/s"])
    axis.set_yticks([1, 2, 5, 10, 20, 50], ["1 x", "2 x", "5 x", "10 x", "20 x", "50 x"])
    axis.minorticks_off()
    axis.set_ylim(bottom=0.8)
    axis.set_ylabel("times faster than dense (float32)")
    model = result["model"].replace("resnet", "ResNet-")
    axis.set_title(f"A step of {model} on {size} machines, {recipe}", fontsize=10, loc="left")
    axis.grid(True, linewidth=0.3)
    axis.legend(frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    _save(figure, target)


def plot_sync(result: Mapping[str, Any], target: Path) -> None:
    """One synchronization by every method, on one logarithmic axis, so that twenty times is seen as such.

    Args:
        result: of `scripts/bench sync`; methods that several launches measured have a dot for each.
        target: file; its ending says the format.
    """
    found: dict[str, list[Any]] = {}
    dense: list[float] = []
    for launch in result["launches"]:
        times = seconds_of(launch)
        dense.append(times.get("dense", float("nan")))
        for item in launch["results"]:
            found.setdefault(item["method"], []).append((item["seconds"], times.get("dense")))
    order = sorted(found, key=lambda name: -min(seconds["median"] for seconds, _ in found[name]))
    figure, axis = plt.subplots(figsize=(8, 0.9 + 0.3 * len(order)), layout="constrained")
    for row, name in enumerate(order):
        plain = name in ("dense", "dense float16", "naive")
        for seconds, _ in found[name]:
            axis.plot([1e3 * seconds["low"], 1e3 * seconds["high"]], [row, row], color=_GREY, linewidth=2)
            axis.plot(1e3 * seconds["median"], row, "o", color=_GREY if plain else _BLUE, markersize=7)
        ratios = [reference / seconds["median"] for seconds, reference in found[name] if reference]
        if ratios and name != "dense":
            end = (1e3 * max(seconds["high"] for seconds, _ in found[name]), row)
            words = f"{ratios[0]:.1f} x"
            axis.annotate(words, end, (8, 0), textcoords="offset points", va="center", fontsize=8)
    slowest = 1e3 * max(dense)
    for factor in (1, 5, 20, 50):
        axis.axvline(slowest / factor, color=_GREY, linewidth=0.8, linestyle=":")
        axis.annotate(
            "dense" if factor == 1 else f"{factor} times faster",
            (slowest / factor, len(order) - 0.4),
            ha="center",
            fontsize=8,
            color="#555555",
        )
    axis.set_xscale("log")
    axis.set_xticks([20, 50, 100, 200, 500, 1000, 2000, 5000])
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.minorticks_off()
    axis.set_yticks(range(len(order)), order, fontsize=8)
    axis.set_ylim(-0.7, len(order) + 0.2)
    words = "milliseconds, median and quartiles; beside it: times faster than dense in the same launch"
    axis.set_xlabel(words, fontsize=9)
    launch, millions = result["launches"][0], result["elements"] / 1e6
    title = (
        f"{launch['ranks']} hosts, {launch['rate']}, {launch['network']}, {millions:.1f} million parameters"
    )
    axis.set_title(f"{title}, density {result['density']}", fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    _save(figure, target)


def _save(figure: Any, target: Path) -> None:
    figure.savefig(target, dpi=120, metadata={"Software": None})
    plt.close(figure)


#: a measurement's name -> what draws it, into a picture of the same name
_DRAWN = {"bandwidth": plot_bandwidth, "sync_gloo": plot_sync}


def made_of(measurements: Mapping[str, Any], tables: Mapping[str, str]) -> dict[str, str]:
    """By the name of every picture a digest of what it shows: its measurement, and the table made of it."""
    return {
        name: hashlib.sha256((json.dumps(result, sort_keys=True) + tables[name]).encode()).hexdigest()[:16]
        for name, result in measurements.items()
        if name in _DRAWN
    }


def draw(measurements: Mapping[str, Any], tables: Mapping[str, str], folder: Path, *, check: bool) -> bool:
    """Draws the pictures that are missing, or of older numbers.

    Args:
        measurements: content of the JSON files by their names.
        tables: made of them.
        folder: of the pictures. `drawn.json` in it says what each was made of.
        check: draw nothing.

    Returns:
        Whether all were as they should be.
    """
    record, wanted = folder / "drawn.json", made_of(measurements, tables)
    present = json.loads(record.read_text()) if record.exists() else {}
    stale = [
        name
        for name, digest in wanted.items()
        if present.get(name) != digest or not (folder / f"{name}.png").exists()
    ]
    if not check:
        for name in stale:
            _DRAWN[name](measurements[name], folder / f"{name}.png")
        record.write_text(json.dumps(wanted, indent=1) + "\n")
    return not stale
