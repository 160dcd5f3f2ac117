"""Results of measurements across hosts, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

_SYNC_PARTS = ("fold", "select", "exchange", "apply", "other")
_TRAIN_PARTS = ("forward", "backward", "exchange", "step", "other")


def ratio_to(baseline: Mapping[str, Any] | None, result: Mapping[str, Any]) -> float | None:
    """How many times faster than a baseline of the same launch; None without one.

    Example:
        >>> ratio_to({"seconds": {"median": 3.0}}, {"seconds": {"median": 0.1}})
        30.0
    """
    if baseline is None:
        return None
    return float(f"{baseline['seconds']['median'] / result['seconds']['median']:.4g}")


def sync_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """One table per launch of `scripts/bench sync`."""
    what = f"n = {result['elements']:,}, density {result['density']}"
    for launch in result["launches"]:
        yield _table(what, launch, _SYNC_PARTS, ("dense", "naive"))


def train_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """One table per launch of `scripts/bench train`."""
    for launch in result["launches"]:
        what = f"{result['model']} in {result['framework']}, n = {launch['elements']:,}, "
        yield _table(f"{what}density {result['density']}", launch, _TRAIN_PARTS, ("dense",))


def _table(what: str, launch: Mapping[str, Any], parts: Sequence[str], references: Sequence[str]) -> Table:
    by_name = {item["method"]: item for item in launch["results"]}
    own = launch["horovod_own"]
    table = Table(
        title=f"{launch['ranks']} hosts at {launch['rate']}, {launch['network']}, {what}; ms and kB",
        caption=f"Horovod by itself: {own['idle_bytes_per_second'] / 1e3:.0f} kB/s per rank, "
        f"{own['idle_cpu_share']:.1%} of a core; {own['tiny_allgather_bytes'] / 1e3:.1f} kB and "
        f"{own['tiny_allgather_seconds'] * 1e3:.1f} ms for an allgather of one word; "
        f"load {launch['load_before']}",
    )
    table.add_column("")
    ratios = [f"{name}/" for name in references]
    for name in ("median", "quartiles", *parts, "CPU", "own CPU", "sent", "expected", "union", *ratios):
        table.add_column(name, justify="right", no_wrap=True)
    for item in launch["results"]:
        table.add_row(*_row(item, parts), *(_ratio(by_name.get(name), item) for name in references))
    return table


def _row(item: Mapping[str, Any], parts: Sequence[str]) -> list[str]:
    seconds, counted = item["seconds"], item["bytes"]
    return [
        item["method"],
        _ms(seconds["median"]),
        f"{_ms(seconds['low'])} {_ms(seconds['high'])}",
        *(_ms(item["parts"].get(name, 0.0)) for name in parts),
        _ms(item["cpu_seconds"]["median"]),
        _ms(item["own_cpu_seconds"]["median"]),
        f"{item['bytes_sent'] / 1e3:,.0f}",
        f"{(counted['wire_bytes'] + counted['negotiation_bytes']) / 1e3:,.0f}",
        f"{item['facts'].get('density_union', 1.0):.5f}",
    ]


def _ratio(baseline: Mapping[str, Any] | None, item: Mapping[str, Any]) -> str:
    ratio = ratio_to(baseline, item)
    return "-" if ratio is None else f"{ratio:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
