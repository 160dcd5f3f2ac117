"""The requests (collectives) that a sparsifier may yield, and the answer to each.

A request says what is to be communicated, not how: a driver carries it out with Horovod, with
mpi4py, or in the one-process simulator. Nothing here is special to Horovod. Buffers are 1-D
contiguous NumPy arrays; a buffer must not be changed until the coroutine is resumed.

A request also says which ranks take part (`Level`): all ranks, those of a host, or one of every host. Ranks
in it (root, sources, receivers) and in the answer are numbered among these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.int32]
Result = TypeVar("Result")


#: of a field of a sparsifier's state that differs from rank to rank: ``field(default=0.0, metadata=LOCAL)``
LOCAL: Mapping[str, bool] = {"local": True}

#: ranks that take part: all, those of this rank's host, or those at its position on their hosts
Level: TypeAlias = Literal["all", "host", "across"]


# arrays have no single truth value, so requests are compared by identity
@dataclass(frozen=True, eq=False)
class AllGather:
    """Requests every rank's buffer, one after another in rank order; lengths may differ.

    Answer: one int32 array, all messages one behind the other in rank order. Messages
    describe their own length (`horovod_sparse.wire`).
    """

    buffer: Words
    level: Level = "all"


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Requests the sum over ranks. All ranks give the same length and dtype (float32 or float64).

    Answer: an array like the buffer.
    """

    buffer: NDArray[Any]
    level: Level = "all"


@dataclass(frozen=True, eq=False)
class ReduceScatter:
    """Requests this rank's slice of the sum over ranks. All ranks give the same length and dtype.

    Answer: rank i's elements of the sum, `rank_part(n, i, P)`.
    """

    buffer: NDArray[Any]
    level: Level = "all"


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Requests the root's buffer. All ranks give the same length and dtype; only the root's content counts.

    Answer: an array like the buffer.
    """

    buffer: NDArray[Any]
    root: int
    level: Level = "all"


@dataclass(frozen=True, eq=False)
class Exchange:
    """Sends messages to some ranks, and requests those of the ranks in `sources`.

    A rank that sends to r must be listed in r's `sources` of the same round, and the other way round.
    Answer: a dict from each source to its message (lengths need not be known beforehand).
    """

    sends: Mapping[int, Words]
    sources: tuple[int, ...]
    level: Level = "all"


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Sends `buffers[r]` to each rank r, and requests every rank's message to this one; lengths may differ.

    Answer: a list whose item r is what rank r sent here.
    """

    buffers: tuple[Words, ...]
    level: Level = "all"


Request: TypeAlias = AllGather | AllReduce | ReduceScatter | Broadcast | Exchange | AllToAll
#: the kinds of collective, by the names that profiles use
COLLECTIVES: dict[type[Request], str] = {
    kind: kind.__name__.lower()
    for kind in (AllGather, AllReduce, Exchange, Broadcast, AllToAll, ReduceScatter)
}

#: A sparsifier at work: yields requests, is sent what comes back, returns its result.
Synchronization: TypeAlias = Generator[Request, Any, Result]


def gather_values(value: Any) -> Synchronization[list[Any]]:
    """Gathers a value of each rank, which may be anything that JSON can hold; returns all, in rank order.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> print(*run_lockstep([gather_values({"rank": rank}) for rank in range(2)])[0])
        {'rank': 0} {'rank': 1}
    """
    line = json.dumps(value).encode()
    line += b" " * (-(len(line) + 1) % 4) + b"\n"
    gathered = yield AllGather(np.frombuffer(line, np.int32))
    return [json.loads(item) for item in np.array(gathered).tobytes().splitlines()]


def rank_part(num_elements: int, rank: int, size: int) -> tuple[int, int]:
    """Returns a rank's part [start, stop) of n elements; the first n mod P ranks have one more.

    Example:
        >>> rank_part(5, 0, 3), rank_part(5, 1, 3), rank_part(5, 2, 3)
        ((0, 2), (2, 4), (4, 5))
    """
    least, more = divmod(num_elements, size)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


def single_request(request: Request) -> Synchronization[Any]:
    return (yield request)


def translate_requests(
    coroutine: Synchronization[Result], carry: Callable[[Request], Synchronization[Any]]
) -> Synchronization[Result]:
    """Runs a coroutine; each request is answered by the result of the coroutine ``carry(request)``."""
    answer: Any = None
    while True:
        try:
            request = coroutine.send(answer)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        answer = yield from carry(request)


def at_level(coroutine: Synchronization[Result], level: Level) -> Synchronization[Result]:
    """Runs a coroutine, and sets the level of its requests: "all" ranks, those of a "host", or "across"."""
    return translate_requests(coroutine, lambda request: single_request(replace(request, level=level)))
