"""What ranks measured, repetition by repetition, and medians of it."""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


def bytes_sent(table: str | None = None) -> int:
    r"""Counts what all interfaces but the loopback of this process's network namespace ever sent.

    Args:
        table: in the form of /proc/net/dev, which is read if left out.

    Example:
        >>> lines = ["", "", "    lo: 7 0 0 0 0 0 0 0 7 0", "  eth0: 9 1 0 0 0 0 0 0 5 1"]
        >>> bytes_sent("\n".join(lines))
        5
    """
    text = Path("/proc/net/dev").read_text() if table is None else table
    lines = (line.partition(":") for line in text.splitlines()[2:])
    return sum(int(numbers.split()[8]) for name, _, numbers in lines if name.strip() != "lo")


def _clocks() -> tuple[float, float, float]:
    """Returns seconds of the machine's clock, of all threads of this process, and of this thread."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), usage.ru_utime + usage.ru_stime, time.thread_time()


@dataclass(frozen=True)
class Sample:
    """The measurements of one repetition on one rank.

    Attributes:
        started: wall clock at its start, comparable between the ranks of one machine.
        ended: and at its end.
        cpu: seconds of the process, Horovod's thread included.
        own: seconds of the thread that synchronizes.
        sent: bytes over the interface, from before until all ranks were done.
        interval: seconds over which those were counted.
        parts: seconds by part.
        facts: what the method says of it, numbers only.
    """

    started: float
    ended: float
    cpu: float
    own: float
    sent: int
    interval: float
    parts: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector out of what is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(run: Callable[[], object], barrier: Callable[[], object]) -> Sample:
    """Runs something once, between two barriers."""
    barrier()
    counted, first = bytes_sent(), _clocks()
    run()
    last = _clocks()
    barrier()
    sent = bytes_sent() - counted
    cpu, own = last[1] - first[1], last[2] - first[2]
    return Sample(first[0], last[0], cpu, own, sent, interval=time.perf_counter() - first[0])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median and quartiles, by name.

    Example:
        >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
        {'median': 3.0, 'low': 2.0, 'high': 4.0}
    """
    low, middle, high = (float(f"{q:.6g}") for q in np.quantile(values, [0.25, 0.5, 0.75]))
    return {"median": middle, "low": low, "high": high}


def summarize(samples: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns medians over repetitions, by name.

    Args:
        samples: [rank][repetition], each a `Sample` as a dict.

    Returns:
        seconds: from the first rank's start to the last rank's end, its median and quartiles; and medians
        over repetitions of means over ranks: cpu_seconds, own_cpu_seconds, bytes_sent, interval_seconds,
        parts (seconds by name; "other" is what is left of a rank's time), facts.
    """
    repetitions = list(zip(*samples, strict=True))
    means: list[dict[str, Any]] = []
    for ranks in repetitions:
        own_seconds = [rank["ended"] - rank["started"] for rank in ranks]
        parts = _mean_of(ranks, "parts")
        parts["other"] = max(0.0, statistics.fmean(own_seconds) - sum(parts.values()))
        numbers = {
            name: statistics.fmean(rank[name] for rank in ranks)
            for name in ("cpu", "own", "sent", "interval")
        }
        means.append({**numbers, "parts": parts, "facts": _mean_of(ranks, "facts")})
    names = {"cpu": "cpu_seconds", "own": "own_cpu_seconds"}
    totals = {"sent": "bytes_sent", "interval": "interval_seconds"}
    return {
        "seconds": spread(
            [max(r["ended"] for r in ranks) - min(r["started"] for r in ranks) for ranks in repetitions]
        ),
        **{label: spread([item[name] for item in means]) for name, label in names.items()},
        **{label: _median([item[name] for item in means]) for name, label in totals.items()},
        "parts": _medians([item["parts"] for item in means]),
        "facts": _medians([item["facts"] for item in means]),
        "repetitions": len(repetitions),
    }


def _mean_of(ranks: Sequence[Mapping[str, Any]], field_name: str) -> dict[str, float]:
    return {name: statistics.fmean(rank[field_name][name] for rank in ranks) for name in ranks[0][field_name]}


def _median(values: Sequence[float]) -> float:
    return float(f"{statistics.median(values):.6g}")


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: _median([row[name] for row in rows]) for name in rows[0]}
