"""Timing collectives on all ranks together, and what a dense training does beside backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Level,
    ReduceScatter,
    Request,
    Synchronization,
)
from horovod_sparse.errors import UnknownNameError
from horovod_sparse.planning.cost_model import Fit, fit_time
from horovod_sparse.planning.profile import ALLREDUCE, START, UPDATE
from horovod_sparse.plans.network import COLLECTIVES

#: sizes that are measured whatever time they take: fewer fix no line
_FEWEST_SIZES = 3
#: repetitions of a size, where there is time for no more
_FEWEST_REPETITIONS = 3


class Stopwatch:
    """A rank's clock, what all ranks' clocks have measured, how often each is read, and who is told of it."""

    def __init__(
        self,
        rank: int,
        size: int,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        cycle_seconds: float,
        starting_seconds: Callable[[], float] = lambda: 0.0,
        repetitions: int = 1,
        tell: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.rank, self.size, self.clock = rank, size, clock
        self.repetitions, self.tell = repetitions, tell
        self.starting_seconds = starting_seconds
        self._sleep, self._cycle_seconds = sleep, cycle_seconds
        self._generator = np.random.default_rng(0)

    def meet(self, measured: Collection[type[Request]] = ()) -> Synchronization[None]:
        """All ranks go on from here at about the same time, somewhere in a cycle."""
        if self.size > 1:
            if AllReduce not in measured:
                yield AllReduce(np.zeros(1, np.float32))
            elif Broadcast not in measured:
                yield Broadcast(np.zeros(1, np.int32), 0)
            else:
                yield AllGather(np.zeros(1, np.int32))
            self._sleep(float(self._generator.random()) * self._cycle_seconds)

    def shared(self, seconds: Sequence[float], slowest: bool = False) -> Synchronization[NDArray[np.float64]]:
        """What ranks have measured, as all have it together: [len(seconds)], the same on all."""
        own = np.array(seconds, np.float64)
        if self.size == 1:
            return own
        gathered = yield AllGather(own.view(np.int32))
        everyone = np.array(gathered).view(np.float64).reshape(self.size, -1)
        return np.asarray(everyone.max(axis=0) if slowest else everyone.mean(axis=0))


def repeated(
    once: Callable[[], Synchronization[Sequence[float]]],
    watch: Stopwatch,
    repetitions: int,
    kinds: Collection[type[Request]],
    *,
    before: Callable[[], None] = lambda: None,
    skip: int = 1,
    slowest: bool = True,
) -> Synchronization[list[list[float]]]:
    """What a coroutine tells of its seconds in each repetition, as all ranks have it together."""
    own: list[float] = []
    for number in range(skip + repetitions):
        before()
        yield from watch.meet(kinds)
        seconds = yield from once()
        if number >= skip:
            own += seconds
    shared = yield from watch.shared(own, slowest)
    found: list[list[float]] = shared.reshape(repetitions, -1).tolist()
    return found


def by_size(
    measured: Callable[[int, int], Synchronization[list[list[float]]]],
    watch: Stopwatch,
    sizes: Sequence[int],
    budget_seconds: float,
) -> Synchronization[tuple[list[float], list[list[float]]]]:
    """Amounts, and a row for each, of what is measured so often at a size, as long as there is time.

    How long larger sizes take is told from the last two by a line, and at most in proportion to their size.
    The next one is repeated as often as all that are left can be alike.
    """
    amounts: list[float] = []
    rows: list[list[float]] = []
    each: list[float] = []  # of a repetition, by size
    often, left = watch.repetitions, budget_seconds
    for number, size in enumerate(sizes):
        began = watch.clock()
        found = yield from measured(size, often)
        amounts += [float(size)] * len(found)
        rows += found
        (elapsed,) = yield from watch.shared([watch.clock() - began])
        left -= elapsed
        each.append(elapsed / (1 + often))
        larger, slope = sizes[number + 1 :], 0.0
        if number:
            slope = max(0.0, each[-1] - each[-2]) / (size - sizes[number - 1])
        expected = [min(each[-1] + slope * (one - size), each[-1] * one / size) for one in larger]
        fitting = int(min(max(0.0, left) / max(1e-9, sum(expected)), 1e9)) - 1
        often = max(min(_FEWEST_REPETITIONS, watch.repetitions), min(watch.repetitions, fitting))
        if number + 1 >= _FEWEST_SIZES and expected and (1 + often) * expected[0] > left:
            break
    return amounts, rows


def request_of(kind: str, num_bytes: int, rank: int, size: int) -> Request:
    """A collective into which a rank puts so many bytes."""
    words = np.ones(max(1, -(-num_bytes // 4)), np.int32)
    if kind == "allgather":
        return AllGather(words)
    if kind == "allreduce":
        return AllReduce(words.astype(np.float32))
    if kind == "reducescatter":
        return ReduceScatter(words.astype(np.float32))
    if kind == "broadcast":
        return Broadcast(words, 0)
    if kind == "exchange":
        return Exchange({(rank + 1) % size: words}, ((rank - 1) % size,))
    if kind == "alltoall":
        part = words[: max(1, words.size // (size - 1))]
        return AllToAll(tuple(words[:0] if peer == rank else part for peer in range(size)))
    raise UnknownNameError("collective", kind, COLLECTIVES.values())


def collective_times(
    kind: str,
    watch: Stopwatch,
    message_bytes: Sequence[int],
    budget_seconds: float,
    level: Level = "all",
    place: tuple[int, int] | None = None,
) -> Synchronization[tuple[list[float], list[float]]]:
    """Seconds of a collective at several sizes."""

    def carried(num_bytes: int) -> tuple[type[Request], Callable[[], Synchronization[Any]]]:
        request = replace(request_of(kind, num_bytes, *(place or (watch.rank, watch.size))), level=level)

        def once() -> Synchronization[Any]:
            return (yield request)

        return type(request), once

    where = {"all": "", "host": " within hosts", "across": " between hosts"}[level]
    return (yield from _times(carried, watch, message_bytes, budget_seconds, f"{kind} of {{}} bytes{where}"))


def _times(
    carried: Callable[[int], tuple[type[Request], Callable[[], Synchronization[Any]]]],
    watch: Stopwatch,
    message_bytes: Sequence[int],
    budget_seconds: float,
    what: str,
) -> Synchronization[tuple[list[float], list[float]]]:
    """Seconds of what is carried out together, at several sizes; `carried` gives its request, and it."""

    def measured(num_bytes: int, often: int) -> Synchronization[list[list[float]]]:
        kind, carry = carried(num_bytes)

        def once() -> Synchronization[Sequence[float]]:
            started = watch.clock()
            yield from carry()
            return (watch.clock() - started,)

        rows = yield from repeated(once, watch, often, {kind}, slowest=False)
        watch.tell(what.format(num_bytes))
        return rows

    amounts, rows = yield from by_size(measured, watch, message_bytes, budget_seconds)
    return amounts, [seconds for (seconds,) in rows]


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
    work: TrainingWork, watch: Stopwatch, budget_seconds: float
) -> Synchronization[dict[str, Fit]]:
    """What a profile calls `training`; all ranks at the same time, so that those that share cores contend."""

    def measured(
        prepared: Callable[[int], Callable[[], object]], what: str
    ) -> Callable[[int, int], Synchronization[list[list[float]]]]:
        """Seconds of what is prepared for a size, and of its start where it gives what waits for its end."""

        def at(size: int, often: int) -> Synchronization[list[list[float]]]:
            run = prepared(size)

            def once() -> Synchronization[Sequence[float]]:
                yield from ()
                began = watch.clock()
                finish = run()
                started = watch.clock()
                if callable(finish):
                    finish()
                return watch.clock() - began, started - began

            rows = yield from repeated(once, watch, often, {AllReduce})
            watch.tell(f"{what} of {size}")
            return rows

        return at

    def sums(num_bytes: int) -> Callable[[], Callable[[], object]]:
        return work.sums(max(1, num_bytes // _FLOAT_BYTES), NUM_PIECES)

    amounts, rows = yield from by_size(measured(work.update, UPDATE), watch, _UPDATED, budget_seconds)
    fits = {UPDATE: fit_time(amounts, [took for took, _ in rows], what="the optimizer's update")}
    if watch.size == 1:
        return fits
    amounts, rows = yield from by_size(measured(sums, "fused allreduce"), watch, _SUMMED, budget_seconds)
    fits[ALLREDUCE] = fit_time(amounts, [took for took, _ in rows], what="fused allreduce")
    each = sorted(began / NUM_PIECES for _, began in rows)
    fits[START] = Fit(each[len(each) // 2], 0.0, num_points=len(set(amounts)))
    return fits
