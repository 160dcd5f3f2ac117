"""Timing on a machine that others use too: everything interleaved, medians, ratios within one round."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# one thread everywhere, before anything starts a pool
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import numpy as np  # noqa: E402

from benchmarks.common.options import bench_parser, count  # noqa: E402
from benchmarks.common.samples import no_collection  # noqa: E402


@dataclass(frozen=True)
class Work:
    """A function to be timed, with its preparation.

    Attributes:
        name: for the table.
        run: what is timed.
        prepare: what brings the memory into the state before, not timed.
        budget: largest ratio to the baseline that is allowed, None for no limit.
        every: timed in one of so many rounds (slow things).
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    budget: float | None = None
    every: int = 1


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one work, and its ratio to the baseline.

    Attributes:
        name: of the work.
        median_ms: median over the rounds.
        quartiles_ms: first and third quartile.
        ratio: median over the rounds of its time by the baseline's time in the same round.
        budget: the work's.
    """

    name: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio: float
    budget: float | None


def seconds_by(work: Work, clock: Callable[[], float] = time.perf_counter) -> float:
    """Prepares a work, and returns what it takes."""
    work.prepare()
    start = clock()
    work.run()
    return clock() - start


def measure(
    baseline: Work,
    works: Sequence[Work],
    num_rounds: int,
    num_warmup: int = 2,
    seconds: Callable[[Work], float] = seconds_by,
) -> list[Timing]:
    """Times everything in turn, round after round.

    Args:
        baseline: what ratios refer to; timed before each work, so that both see the same machine.
        works: the rest.
        num_rounds: how many times.
        num_warmup: rounds that do not count (compiling, first touch of memory, an empty residual).
        seconds: prepares a work, runs it and says how long that took; the host's clock if left out.

    Returns:
        The baseline's timing, then one for each work.
    """
    base: list[float] = []
    times: list[list[float]] = [[] for _ in works]
    ratios: list[list[float]] = [[] for _ in works]
    with no_collection():
        for number in range(-num_warmup, num_rounds):
            for place, work in enumerate(works):
                if number % work.every and number >= 0:
                    continue
                reference, own = seconds(baseline), seconds(work)
                if number >= 0:
                    base.append(reference)
                    times[place].append(own)
                    ratios[place].append(own / reference)
    timings = [_timing(baseline, base, [1.0])]
    return timings + [_timing(work, *pair) for work, *pair in zip(works, times, ratios, strict=True)]


def _timing(work: Work, seconds: list[float], ratios: list[float]) -> Timing:
    low, middle, high = (float(q) * 1e3 for q in np.quantile(seconds, [0.25, 0.5, 0.75]))
    return Timing(work.name, middle, (low, high), float(np.median(ratios)), work.budget)


def rank_parser(name: str, about: str | None, density_default: float) -> argparse.ArgumentParser:
    """Returns a parser with the options of measurements of one rank on one thread."""
    parser = bench_parser(name, about)
    parser.set_defaults(density=density_default, repeat=15)
    parser.add_argument("--elements", type=count, default=25_600_000, help="n (default %(default)s)")
    return parser


def timed(timings: Sequence[Timing], options: argparse.Namespace, **facts: Any) -> dict[str, Any]:
    """Returns timings as they are written to JSON, the baseline's first, with what was asked for."""
    asked = {"elements": options.elements, "density": options.density, "rounds": options.repeat, "threads": 1}
    return {**asked, **facts, "timings": [asdict(timing) for timing in timings]}
