"""Timing what a dense training does beside backward: the optimizer's update, Horovod's own sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from horovod_sparse.collectives import AllReduce, Synchronization
from horovod_sparse.planning.calibration.collectives import Allowance, Stopwatch
from horovod_sparse.planning.fitting import Fit, fit_time
from horovod_sparse.planning.profile import ALLREDUCE, START, UPDATE

#: elements of what is updated: caches do not hold the larger ones, as they do not hold a model
_UPDATED = (1 << 10, 1 << 20, 1 << 22, 1 << 24)
#: bytes of gradients that are summed together. Horovod fuses at most 128 MiB, so that a line through the
#: first three, which are measured whatever time they take, has to reach near that
_SUMMED = (1 << 16, 1 << 21, 1 << 25, 1 << 26)
#: tensors that those are in: from two on they are fused, copied into a buffer and back
NUM_PIECES = 8
_FLOAT_BYTES = 4
#: that are told of at most
NUM_TRAINING_SIZES = len(_UPDATED) + len(_SUMMED)


class TrainingWork(Protocol):
    """What a framework does in a dense training; every method prepares, what it gives back is timed."""

    def update(self, num_elements: int) -> Callable[[], object]:
        """One step of SGD with momentum, of a parameter of so many elements."""

    def sums(self, num_elements: int, pieces: int) -> Callable[[], Callable[[], object]]:
        """Starts means over ranks, of so many elements in all; what that returns waits for them."""


def training_times(
    work: TrainingWork, watch: Stopwatch, repetitions: int, budget_seconds: float, tell: Callable[[str], None]
) -> Synchronization[dict[str, Fit]]:
    """What a profile calls `training`; all ranks at the same time, so that those that share cores contend."""
    fits: dict[str, Fit] = {}
    amounts, seconds = yield from _sized(
        lambda n: _timed(work.update(n), watch), _UPDATED, watch, repetitions, budget_seconds, tell, UPDATE
    )
    fits[UPDATE] = fit_time(amounts, [took for took, _ in seconds], what="the optimizer's update")
    if watch.size == 1:
        return fits
    amounts, seconds = yield from _sized(
        lambda n: _started(work.sums(max(1, n // _FLOAT_BYTES), NUM_PIECES), watch),
        _SUMMED,
        watch,
        repetitions,
        budget_seconds,
        tell,
        "fused allreduce",
    )
    fits[ALLREDUCE] = fit_time(amounts, [took for took, _ in seconds], what="fused allreduce")
    each = sorted(began / NUM_PIECES for _, began in seconds)
    fits[START] = Fit(each[len(each) // 2], 0.0, num_points=len(set(amounts)))
    return fits


def _timed(run: Callable[[], object], watch: Stopwatch) -> Callable[[], tuple[float, float]]:
    def once() -> tuple[float, float]:
        began = watch.clock()
        run()
        return watch.clock() - began, 0.0

    return once


def _started(
    start: Callable[[], Callable[[], object]], watch: Stopwatch
) -> Callable[[], tuple[float, float]]:
    def once() -> tuple[float, float]:
        began = watch.clock()
        finish = start()
        started = watch.clock()
        finish()
        return watch.clock() - began, started - began

    return once


def _sized(
    prepared: Callable[[int], Callable[[], tuple[float, float]]],
    sizes: Sequence[int],
    watch: Stopwatch,
    repetitions: int,
    budget_seconds: float,
    tell: Callable[[str], None],
    what: str,
) -> Synchronization[tuple[list[float], list[tuple[float, float]]]]:
    """Amounts and two times of each, those of the slowest rank, as many each."""
    amounts: list[float] = []
    seconds: list[tuple[float, float]] = []
    allowance = Allowance(sizes, repetitions, budget_seconds)
    for number, size in enumerate(sizes):
        began, once, own = watch.clock(), prepared(size), list[tuple[float, float]]()
        for _ in range(1 + allowance.repetitions):
            yield from watch.meet({AllReduce})
            own.append(once())
        flat = [value for pair in own[1:] for value in pair]
        *times, elapsed = yield from watch.shared([*flat, watch.clock() - began], slowest=True)
        amounts += [float(size)] * allowance.repetitions
        seconds += zip(map(float, times[0::2]), map(float, times[1::2]), strict=True)
        tell(f"{what} of {size}")
        if not allowance.spend(number, elapsed):
            break
    return amounts, seconds
