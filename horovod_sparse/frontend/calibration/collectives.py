"""Timing collectives on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

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
from horovod_sparse.cost.model import COLLECTIVES
from horovod_sparse.errors import UnknownNameError

#: sizes of a collective that are measured whatever time they take: fewer fix no line
_FEWEST_SIZES = 3


class Stopwatch:
    """A rank's clock, and what all ranks' clocks have measured.

    Args:
        rank: of this process.
        size: P.
        clock: seconds.
        sleep: waits for seconds.
        cycle_seconds: Horovod's cycle. One collective behind the other would always begin at the same
            place in a cycle; so ranks sleep for a random part of one, the same on all, before each.
        starting_seconds: how long it took to start the last request, for a driver that starts requests
            and waits for them later: a training's own thread does the first.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        cycle_seconds: float,
        starting_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.rank, self.size, self.clock = rank, size, clock
        self.starting_seconds = starting_seconds
        self._sleep, self._cycle_seconds = sleep, cycle_seconds
        self._generator = np.random.default_rng(0)

    def meet(self, measured: Collection[type[Request]] = ()) -> Synchronization[None]:
        """All ranks go on from here at about the same time, somewhere in a cycle.

        Args:
            measured: types of requests that follow. They meet by another: Horovod's response cache takes
                a name whose size has changed for a new one, and that would be measured, too.
        """
        if self.size > 1:
            if AllReduce not in measured:
                yield AllReduce(np.zeros(1, np.float32))
            elif Broadcast not in measured:
                yield Broadcast(np.zeros(1, np.int32), 0)
            else:
                yield AllGather(np.zeros(1, np.int32))
            self._sleep(float(self._generator.random()) * self._cycle_seconds)

    def shared(self, seconds: Sequence[float]) -> Synchronization[NDArray[np.float64]]:
        """Means over ranks of what each has measured: [len(seconds)], the same on all."""
        own = np.array(seconds, np.float64)
        if self.size == 1:
            return own
        gathered = yield AllGather(own.view(np.int32))
        return np.array(gathered).view(np.float64).reshape(self.size, -1).mean(axis=0)


def request_of(kind: str, num_bytes: int, rank: int, size: int) -> Request:
    """A collective into which a rank puts so many bytes.

    Args:
        kind: "allgather", "allreduce", "reducescatter", "exchange", "broadcast" or "alltoall".
        num_bytes: rounded up to words of 4 bytes.
        rank: of this process.
        size: P, 2 or more.

    Raises:
        UnknownNameError: for another kind.
    """
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
    repetitions: int,
    budget_seconds: float,
    tell: Callable[[str], None],
    level: Level = "all",
    place: tuple[int, int] | None = None,
) -> Synchronization[tuple[list[float], list[float]]]:
    """Seconds of a collective at several sizes.

    Args:
        kind: see `request_of`.
        watch: of this rank.
        message_bytes: that a rank puts in, ascending.
        repetitions: of each size, beside one to warm up.
        budget_seconds: no further size is begun after so long, means over ranks.
        tell: gets a line after each size.
        level: among whom: with others than all ranks, all groups of a level are at work at a time.
        place: (rank, size) within the group; of the watch if left out.

    Returns:
        Bytes and seconds, as many each; the same on all ranks.
    """
    amounts: list[float] = []
    seconds: list[float] = []
    began = watch.clock()
    for number, num_bytes in enumerate(message_bytes):
        request = replace(request_of(kind, num_bytes, *(place or (watch.rank, watch.size))), level=level)
        own = []
        for _ in range(1 + repetitions):
            yield from watch.meet({type(request)})
            started = watch.clock()
            yield request
            own.append(watch.clock() - started)
        *means, elapsed = yield from watch.shared([*own[1:], watch.clock() - began])
        amounts += [float(num_bytes)] * repetitions
        seconds += map(float, means)
        where = {"all": "", "host": " within hosts", "across": " between hosts"}[level]
        tell(f"{kind} of {num_bytes} bytes{where}")
        if number + 1 >= _FEWEST_SIZES and elapsed > budget_seconds:
            break
    return amounts, seconds
