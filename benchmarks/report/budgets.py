"""Every budget of docs/performance.md, and what is measured of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from benchmarks.report.tables import markdown

#: sparsifiers with the stricter budget: exclusive selection, no build-up
_EXCLUSIVE = ("exdyna", "micro")
_BASELINES = ("dense", "dense float16", "naive")
Rows = list[list[str]]


def budget_table(measurements: Mapping[str, Any]) -> str:
    """All budgets.

    Args:
        measurements: content of the JSON files by their names without ending.
    """
    rows: Rows = []
    if local := measurements.get("local"):
        rows += _local(local)
    rows += _sync(measurements)
    if frameworks := measurements.get("frameworks"):
        rows += _frameworks(frameworks)
    if tape := measurements.get("tape"):
        added, asked = tape["ms"]["added"]["median"], tape["budget_ms"]
        what = f"added by TensorFlow's tape, {tape['variables']} variables (ms)"
        rows.append([what, f"≤ {asked:g}", f"{added:.2f}", _verdict(added <= asked)])
    if drift := measurements.get("drift"):
        share, asked = drift["share"], drift["budget"]
        what = f"comparing replicas every {drift['check_every']} steps, of a step"
        rows.append([what, f"≤ {asked:.0%}", f"{share:.2%}", _verdict(share <= asked)])
    if growth := measurements.get("growth"):
        rows += _growth(growth)
    return markdown(["budget", "asked", "measured", ""], rows)


def _verdict(fits: bool) -> str:
    return "met" if fits else "**missed**"


def _local(result: Mapping[str, Any]) -> Rows:
    rows = []
    for item in result["timings"]:
        if (budget := item.get("budget")) is not None:
            name = f"local, {item['name']}, by {result['baseline']}"
            rows.append([name, f"≤ {budget:g}", f"{item['ratio']:.2f}", _verdict(item["ratio"] <= budget)])
    memory = result["extra_memory"]
    rows.append(
        ["local, memory beyond residual and gradient", "≤ 5 %", f"{memory:.1%}", _verdict(memory <= 0.05)]
    )
    return rows


def _frameworks(result: Mapping[str, Any]) -> Rows:
    return [
        [f"local, {item['name']}, by PyTorch", f"≤ {budget:g}", f"{item['ratio']:.2f}", _verdict(fits)]
        for item in result["timings"]
        if (budget := item.get("budget")) is not None
        for fits in [item["ratio"] <= budget]
    ]


def full_launches(measurements: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Launches of the kind that the budgets speak of: 8 hosts at 1 Gbit/s, Horovod's cycle of 1 ms."""
    for name, result in measurements.items():
        if name.startswith("sync") and result["elements"] >= 25_000_000 and result["density"] == 0.001:
            for launch in result["launches"]:
                usual = launch["rate"] == "1gbit" and launch["cycle_time_ms"] in (None, 1.0)
                if launch["ranks"] == 8 and usual:
                    yield launch


def _sync(measurements: Mapping[str, Any]) -> Rows:
    launches = list(full_launches(measurements))
    dense = [
        (item["seconds"]["median"], launch["network"])
        for launch in launches
        for item in launch["results"]
        if item["method"] == "dense"
    ]
    if not dense:
        return []
    best, best_network = min(dense)
    rows = []
    for launch in launches:
        by_name = {item["method"]: item for item in launch["results"]}
        for name, item in by_name.items():
            if name in _BASELINES or ":" in name:
                continue
            asked = (35, 20) if name in _EXCLUSIVE else (15, 5)
            seconds = item["seconds"]["median"]
            for reference, limit in zip(("dense", "naive"), asked, strict=True):
                if reference not in by_name:
                    continue
                ratio = by_name[reference]["seconds"]["median"] / seconds
                what = f"{launch['network']}: {name} against {reference} {launch['network']}"
                rows.append([what, f"≥ {limit}", f"{ratio:.1f}", _verdict(ratio >= limit)])
            if best_network != launch["network"]:
                ratio = best / seconds
                what = f"{launch['network']}: {name} against the best dense ({best_network})"
                rows.append([what, f"≥ {asked[0]}", f"{ratio:.1f}", _verdict(ratio >= asked[0])])
            counted = item["bytes"]
            off = item["bytes_sent"] / (counted["wire_bytes"] + counted["negotiation_bytes"]) - 1
            what = f"{launch['network']}: {name}, bytes by declared and negotiation"
            rows.append([what, "± 10 %", f"{off:+.1%}", _verdict(abs(off) <= 0.1)])
    return rows


def _growth(result: Mapping[str, Any]) -> Rows:
    rows = []
    launches = sorted(result["launches"], key=lambda launch: launch["ranks"])
    for name in _EXCLUSIVE:
        own = [
            item["own_cpu_seconds"]["median"] * 1e3
            for launch in launches
            for item in launch["results"]
            if item["method"] == name
        ]
        if len(own) > 1:
            # what a median of a few repetitions can tell apart
            fits = all(after <= 1.05 * before for before, after in pairwise(own))
            sizes = ", ".join(str(launch["ranks"]) for launch in launches)
            what = f"{name}: CPU time of a rank at P = {sizes} (ms)"
            rows.append(
                [what, "falls or stays (5 %)", ", ".join(f"{value:.1f}" for value in own), _verdict(fits)]
            )
    return rows
