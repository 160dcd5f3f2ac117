"""Goals that were set after the first budgets: rounds beside Horovod, two levels, a small model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.report.tables import markdown

Rows = list[list[str]]
_PAIRS = {"Gloo": "rounds_pairs", "MPI": "rounds_pairs_mpi"}


def goal_table(measurements: Mapping[str, Any]) -> str:
    """All of them that have their measurement, met or missed."""
    rows = [
        *_beside_horovod(measurements),
        *_four_hosts(measurements),
        *_iterations(measurements),
        *_levels(measurements),
        *_small(measurements),
    ]
    return markdown(["goal", "asked", "measured", ""], rows)


def _row(what: str, measured: float, limit: float, *, least: bool = False, digits: int = 2) -> list[str]:
    shown = round(measured, digits)
    fits = shown >= limit if least else shown <= limit
    sign = "≥" if least else "≤"
    return [what, f"{sign} {limit:g}", f"{shown:.{digits}f}", "met" if fits else "**missed**"]


def _median(item: Mapping[str, Any]) -> float:
    return float(item["seconds"]["median"])


def _by_name(launch: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {item["method"]: item for item in launch["results"]}


def _ways(found: Mapping[str, Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """A method by Horovod's rounds, and by messages between pairs of ranks."""
    return [found[way] for way in (name, f"{name}, pairs") if way in found]


def _beside_horovod(measurements: Mapping[str, Any]) -> Iterator[list[str]]:
    """The better way of the two counts."""
    for network, file in _PAIRS.items():
        launches = [_by_name(launch) for launch in measurements.get(file, {}).get("launches", [])]
        if not launches:
            continue
        waits = {
            way: next(found[way]["parts"]["exchange"] for found in launches if way in found)
            for way in ("topk", "topk, pairs")
        }
        limits = {"dense": {"micro": 30, "exdyna": 30, "oktopk": 15}, "naive": {"micro": 22, "exdyna": 22}}
        if network == "MPI":
            limits["dense"] |= {"micro": 50, "exdyna": 50}
        for reference, asked in limits.items():
            for name, limit in asked.items():
                (found,) = [found for found in launches if name in found]
                ratio = max(_median(found[reference]) / _median(item) for item in _ways(found, name))
                what = f"{network}, 8 hosts: {name} against {reference}"
                yield _row(what, ratio, limit, least=True, digits=1)
        for name in ("micro", "exdyna"):
            (found,) = [found for found in launches if name in found]
            ratio = min(
                item["parts"]["exchange"] / waits[item["method"].replace(name, "topk")]
                for item in _ways(found, name)
            )
            yield _row(f"{network}, 8 hosts: waiting of {name} by that of topk", ratio, 1.0)
        dense = [_median(found["dense"]) for found in launches]
        what = f"{network}: dense allreduce, the slowest of {len(dense)} launches by the fastest"
        yield _row(what, max(dense) / min(dense), 1.1)


def _four_hosts(measurements: Mapping[str, Any]) -> Iterator[list[str]]:
    for launch in measurements.get("rounds_4_hosts", {}).get("launches", []):
        found = _by_name(launch)
        for name in ("exdyna", "topk", "spardl"):
            ratio = max(_median(found["dense"]) / _median(item) for item in _ways(found, name))
            yield _row(f"Gloo, 4 hosts: {name} against dense", ratio, 50, least=True, digits=1)


def _iterations(measurements: Mapping[str, Any]) -> Iterator[list[str]]:
    for launch in measurements.get("train_pairs", {}).get("launches", []):
        found = _by_name(launch)
        for name in ("exdyna", "topk"):
            ratio = min(_median(item) for item in _ways(found, name)) / _median(found["alone"])
            yield _row(f"ResNet-50's iteration on 8 hosts by computing alone: {name}", ratio, 1.1)
        item = found["topk, pairs"]
        beyond = 1e3 * (item["cpu_seconds"]["median"] - item["own_cpu_seconds"]["median"])
        yield _row("CPU time beyond a rank's own thread in it, ms (half of 46)", beyond, 23, digits=0)


def _levels(measurements: Mapping[str, Any]) -> Iterator[list[str]]:
    for launch in measurements.get("levels_gloo", {}).get("launches", []):
        found = _by_name(launch)
        (name,) = launch["sparsifiers"]
        flat, two, start = found[name], found[f"{name}, two levels"], f"two levels by one, {name}"
        payload = two["facts"]["bytes_sent"] / flat["facts"]["bytes_sent"]
        yield _row(f"{start}: payload between hosts", payload, 0.55 if name == "topk" else 0.6)
        yield _row(f"{start}: bytes that left the hosts", two["bytes_sent"] / flat["bytes_sent"], 1.0)
        work = [sum(item["parts"][part] for part in ("fold", "select")) for item in (two, flat)]
        yield _row(f"{start}: fold and selection", work[0] / work[1], 0.55)
        memory = two["facts"]["residual_bytes"] / flat["facts"]["residual_bytes"]
        yield _row(f"{start}: memory of the residual", memory, 0.5)
        yield _row(f"{start}: one synchronization", _median(two) / _median(flat), 0.7)


def _small(measurements: Mapping[str, Any]) -> Iterator[list[str]]:
    for launch in measurements.get("digits", {}).get("launches", []):
        found = _by_name(launch)
        for name, limit in {
            "topk": 1.3,
            "exdyna": 1.3,
            "topk by default": 1.05,
            "exdyna by default": 1.05,
        }.items():
            ratio = _median(found[name]) / _median(found["dense"])
            yield _row(f"digits on one machine, {launch['network']}: {name} by dense", ratio, limit)
