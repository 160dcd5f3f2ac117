"""The requests that a sparsifier may yield, and what comes back for each.

A request says what is to be communicated, not how: a driver carries it out with Horovod, with
mpi4py, or in the one-process simulator. Nothing here is special to Horovod. Buffers are 1-D
contiguous NumPy arrays; a buffer must not be changed until the coroutine is resumed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.int32]
Result = TypeVar("Result")


#: of a field of a sparsifier's state that differs from rank to rank: ``field(default=0.0, metadata=LOCAL)``
LOCAL: Mapping[str, bool] = {"local": True}
#: of a field that older checkpoints have not got: it keeps its first value then
ADDED: Mapping[str, bool] = {"added": True}


# arrays have no single truth value, so requests are compared by identity
@dataclass(frozen=True, eq=False)
class AllGather:
    """Every rank's message, of any length each.

    Comes back: one int32 array, all messages one behind the other in rank order. Messages
    describe their own length (`horovod_sparse.wire`).
    """

    buffer: Words


@dataclass(frozen=True, eq=False)
class AllReduce:
    """The sum over ranks. All ranks give the same length and dtype (float32 or float64).

    Comes back: an array like the buffer.
    """

    buffer: NDArray[Any]


@dataclass(frozen=True, eq=False)
class Broadcast:
    """The root's buffer. All ranks give the same length and dtype; only the root's content counts.

    Comes back: an array like the buffer.
    """

    buffer: NDArray[Any]
    root: int


@dataclass(frozen=True, eq=False)
class Exchange:
    """Messages between pairs of ranks.

    A rank that sends to r must be listed in r's `sources` of the same round, and the other way round.
    Comes back: a dict from each source to its message (lengths need not be known beforehand).
    """

    sends: Mapping[int, Words]
    sources: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class AllToAll:
    """One message from every rank to every rank, of any length each; `buffers[r]` goes to rank r.

    Comes back: a list whose item r is what rank r sent here.
    """

    buffers: tuple[Words, ...]


Request: TypeAlias = AllGather | AllReduce | Broadcast | Exchange | AllToAll

#: A sparsifier at work: yields requests, is sent what comes back, returns its result.
Synchronization: TypeAlias = Generator[Request, Any, Result]


def num_bytes_sent(request: Request, rank: int) -> int:
    """Payload bytes that this rank puts into a request, each byte counted once.

    Args:
        request: any request.
        rank: the asking rank (a message to itself costs nothing; only a broadcast's root sends).

    Example:
        >>> num_bytes_sent(AllGather(np.zeros(10, np.int32)), rank=0)
        40
    """
    if isinstance(request, Broadcast):
        return request.buffer.nbytes if request.root == rank else 0
    if isinstance(request, Exchange):
        return sum(buffer.nbytes for peer, buffer in request.sends.items() if peer != rank)
    if isinstance(request, AllToAll):
        return sum(buffer.nbytes for peer, buffer in enumerate(request.buffers) if peer != rank)
    return request.buffer.nbytes
