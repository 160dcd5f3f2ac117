"""Timing collectives on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import collectives
from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.errors import UnknownNameError
from horovod_sparse.plans.network import COLLECTIVES

#: sizes that are measured whatever time they take: fewer fix no line
_FEWEST_SIZES = 3
#: repetitions of a size, where there is time for no more
_FEWEST_REPETITIONS = 3


class Stopwatch:
    """A rank's clock, and means or maxima over all ranks of the seconds that it measured."""

    def __init__(
        self,
        rank: int,
        size: int,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        cycle_seconds: float,
        starting_seconds: Callable[[], float] = lambda: 0.0,
        repetitions: int = 1,
    ) -> None:
        self.rank, self.size, self.clock = rank, size, clock
        self.repetitions, self.starting_seconds = repetitions, starting_seconds
        self._sleep, self._cycle_seconds = sleep, cycle_seconds
        self._generator = np.random.default_rng(0)

    def meet(self, measured: Collection[type[Request]] = ()) -> Synchronization[None]:
        """Lets all ranks go on at about the same time, at a random point of Horovod's cycle."""
        if self.size > 1:
            if collectives.AllReduce not in measured:
                yield collectives.AllReduce(np.zeros(1, np.float32))
            elif collectives.Broadcast not in measured:
                yield collectives.Broadcast(np.zeros(1, np.int32), 0)
            else:
                yield collectives.AllGather(np.zeros(1, np.int32))
            self._sleep(float(self._generator.random()) * self._cycle_seconds)

    def shared(self, seconds: Sequence[float], slowest: bool = False) -> Synchronization[NDArray[np.float64]]:
        """Returns means (or maxima) of the seconds over ranks: [len(seconds)], the same on all."""
        own = np.array(seconds, np.float64)
        if self.size == 1:
            return own
        gathered = yield collectives.AllGather(own.view(np.int32))
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
    """Repeats a coroutine that returns seconds, and returns a row for each repetition, equal on all ranks."""
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
    """Measures at ascending sizes while the budget lasts, and returns the sizes and a row for each.

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
    """Returns a collective into which a rank puts `num_bytes`."""
    words = np.ones(max(1, -(-num_bytes // 4)), np.int32)
    if kind == "allgather":
        return collectives.AllGather(words)
    if kind == "allreduce":
        return collectives.AllReduce(words.astype(np.float32))
    if kind == "reducescatter":
        return collectives.ReduceScatter(words.astype(np.float32))
    if kind == "broadcast":
        return collectives.Broadcast(words, 0)
    if kind == "exchange":
        return collectives.Exchange({(rank + 1) % size: words}, ((rank - 1) % size,))
    if kind == "alltoall":
        part = words[: max(1, words.size // (size - 1))]
        return collectives.AllToAll(tuple(words[:0] if peer == rank else part for peer in range(size)))
    raise UnknownNameError("collective", kind, COLLECTIVES.values())


def collective_times(
    kind: str,
    watch: Stopwatch,
    message_bytes: Sequence[int],
    budget_seconds: float,
    level: collectives.Level = "all",
    place: tuple[int, int] | None = None,
) -> Synchronization[tuple[list[float], list[float]]]:
    """Times a collective at several sizes."""

    def measured(num_bytes: int, often: int) -> Synchronization[list[list[float]]]:
        request = replace(request_of(kind, num_bytes, *(place or (watch.rank, watch.size))), level=level)

        def once() -> Synchronization[Sequence[float]]:
            started = watch.clock()
            yield request
            return (watch.clock() - started,)

        return (yield from repeated(once, watch, often, {type(request)}, slowest=False))

    amounts, rows = yield from by_size(measured, watch, message_bytes, budget_seconds)
    return amounts, [seconds for (seconds,) in rows]
