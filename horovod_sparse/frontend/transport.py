"""Messages between two ranks over mpi4py, on a communicator that nobody else uses.

Collectives can be made of them, too: `by_exchanges` says how.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
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
    ReduceScatter,
    Request,
    Synchronization,
)
from horovod_sparse.errors import CollectiveMismatchError, UnknownNameError
from horovod_sparse.topology import Topology

Words = NDArray[np.int32]

#: "auto"; "alltoall" to do without MPI's messages; "mpi" to make all rounds of sparsifiers of them, where
#: all ranks can, not exchanges alone. The same on all ranks.
TRANSPORT_VARIABLE = "HOROVOD_SPARSE_TRANSPORT"
_WAYS = ("auto", "alltoall", "mpi")

#: words in front of every message: a hash of its name, how often that name was used before, and its length
_HEADER = 4
_HEADER_TAG, _BODY_TAG = 1, 2
_SLEEP_SECONDS = 20e-6


def mpi_for(hvd: Any) -> tuple[Any, str]:
    """mpi4py's module MPI, if this rank can use it beside Horovod.

    Args:
        hvd: Horovod's binding for a framework.

    Returns:
        The module, or None and why it cannot be used.

    Raises:
        UnknownNameError: the environment asks for something else than there is.
    """
    wanted = os.environ.get(TRANSPORT_VARIABLE, "auto")
    if wanted not in _WAYS:
        raise UnknownNameError(TRANSPORT_VARIABLE, wanted, _WAYS)
    if wanted == "alltoall":
        return None, f"{TRANSPORT_VARIABLE} says so"
    if not hvd.mpi_enabled():
        return None, "Horovod does not run on MPI"
    if not hvd.mpi_threads_supported():
        return None, "MPI does not support several threads"
    return _mpi_of(hvd.rank(), hvd.size())


def rounds_by_pairs() -> bool:
    """Whether all rounds of sparsifiers are to travel as messages between pairs of ranks."""
    return os.environ.get(TRANSPORT_VARIABLE) == "mpi"


def by_exchanges(request: Request, rank: int, size: int) -> Synchronization[Any]:
    """A collective as messages between pairs: nothing waits for a cycle of Horovod.

    Every rank sends its message to every other, which is as many bytes as a ring moves. A sum is made in
    parts: each rank adds up one, in the order of ranks, and sends it to all, so all have the same bits.

    Args:
        request: any but an exchange, with a buffer of NumPy's.
        rank: of this process within those that take part.
        size: P.

    Returns:
        What comes back for the request.
    """
    others = tuple(peer for peer in range(size) if peer != rank)
    if isinstance(request, AllGather):
        arrived = yield Exchange(dict.fromkeys(others, request.buffer), others)
        return np.concatenate([request.buffer if peer == rank else arrived[peer] for peer in range(size)])
    if isinstance(request, AllToAll):
        arrived = yield Exchange({peer: request.buffers[peer] for peer in others}, others)
        return [request.buffers[peer].copy() if peer == rank else arrived[peer] for peer in range(size)]
    if isinstance(request, Broadcast):
        words = np.ascontiguousarray(request.buffer).view(np.int32)
        if request.root == rank:
            yield Exchange(dict.fromkeys(others, words), ())
            return request.buffer.copy()
        arrived = yield Exchange({}, (request.root,))
        return arrived[request.root].view(request.buffer.dtype)
    if isinstance(request, Exchange):
        raise TypeError(f"an {type(request).__name__} is messages between pairs already")
    dtype, parts = request.buffer.dtype, np.array_split(request.buffer, size)
    arrived = yield Exchange({peer: parts[peer].view(np.int32) for peer in others}, others)
    total = np.zeros_like(parts[rank])
    for peer in range(size):
        total += parts[rank] if peer == rank else arrived[peer].view(dtype)
    if isinstance(request, ReduceScatter):
        return total
    arrived = yield Exchange(dict.fromkeys(others, total.view(np.int32)), others)
    return np.concatenate([total if peer == rank else arrived[peer].view(dtype) for peer in range(size)])


def over_hosts(coroutine: Synchronization[Any], topology: Topology, rank: int) -> Synchronization[Any]:
    """A synchronization of two levels, whose requests of single levels are messages between pairs of ranks.

    So it needs no process sets, each of which costs every cycle of Horovod one more coordination.

    Args:
        coroutine: of this rank.
        topology: which ranks share a host.
        rank: of this process, among all.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> def column(rank):
        ...     gathered = yield AllGather(np.full(1, rank, np.int32), level="across")
        ...     return gathered.tolist()
        >>> topology = Topology.regular(2, 2)
        >>> run_lockstep([over_hosts(column(rank), topology, rank) for rank in range(4)])
        [[0, 2], [1, 3], [0, 2], [1, 3]]
    """
    answer: Any = None
    while True:
        try:
            request = coroutine.send(answer)
        except StopIteration as stop:
            return stop.value
        if request.level == "all":
            answer = yield request
        else:
            answer = yield from _among(request, topology.group(request.level, rank), rank)


def _among(request: Request, ranks: Sequence[int], rank: int) -> Synchronization[Any]:
    """What comes back for a request among some ranks, by exchanges among all; none, where it is one."""
    place, request = ranks.index(rank), replace(request, level="all")
    places = {peer: number for number, peer in enumerate(ranks)}
    steps = _alone(request) if isinstance(request, Exchange) else by_exchanges(request, place, len(ranks))
    answer: Any = None
    while True:
        try:
            exchange = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        if not isinstance(exchange, Exchange):
            raise TypeError("collectives are made of exchanges alone")
        if len(ranks) == 1:
            answer = {peer: exchange.sends[peer].copy() for peer in exchange.sources}
            continue
        sends = {ranks[peer]: words for peer, words in exchange.sends.items()}
        arrived = yield Exchange(sends, tuple(ranks[peer] for peer in exchange.sources))
        answer = {places[peer]: words for peer, words in arrived.items()}


def rounds_over_hosts(rounds: Sequence[type[Request]], topology: Topology) -> tuple[type[Request], ...]:
    """The kinds of request that `over_hosts` yields for a bucket of two levels.

    Args:
        rounds: of the sparsifier, among hosts; see `Sparsifier.rounds`.
        topology: which ranks share a host.

    Example:
        >>> len(rounds_over_hosts((AllGather, AllReduce), Topology.regular(2, 2)))
        5
        >>> len(rounds_over_hosts((AllGather,), Topology.regular(1, 2)))
        2
    """
    inside = 2 if topology.per_host > 1 else 0
    between = sum(2 if kind is AllReduce else 1 for kind in rounds) if topology.num_hosts > 1 else 0
    return (Exchange,) * (inside + between)


def _mpi_of(rank: int, size: int) -> tuple[Any, str]:
    """mpi4py's module MPI, if its ranks are those of Horovod.

    Args:
        rank: of this process in Horovod.
        size: P in Horovod.

    Returns:
        The module, or None and why it cannot be used.
    """
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        return None, f"mpi4py cannot be imported: {error}"
    world = mpi.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        return (
            None,
            f"MPI counts rank {world.Get_rank()} of {world.Get_size()}, Horovod rank {rank} of {size}",
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return None, "MPI was not started for several threads"
    return mpi, ""


#: all that were made: MPI may still use their memory when nobody else does
_made: list[MpiPairs] = []


class MpiPairs:
    """Sends and receives for many exchanges at once.

    A header goes in front of every message and is taken in as it arrives, whoever it is for; a hash of the
    exchange's name in it says to whom the message belongs, and its length how much memory that needs. So no
    rank waits for a message in particular, names need no place in MPI's small space of tags, and the
    order in which ranks start exchanges is free. Several exchanges of one name, one behind the other, are
    told apart by their number. (Probing for messages instead needs no header, but is not sound in every
    MPI where several threads communicate, and Horovod's thread does.)

    Making one waits until all ranks of the set do. One thread at a time uses it.

    Args:
        mpi: mpi4py's MPI.
        ranks: of the process set, in the world.
        tag: for making the communicator; the same on all ranks.
    """

    def __init__(self, mpi: Any, ranks: Sequence[int], tag: int = 0) -> None:
        self._mpi = mpi
        world = mpi.COMM_WORLD.Get_group()
        self._comm = mpi.COMM_WORLD.Create_group(world.Incl(list(ranks)), tag=tag)
        world.Free()
        #: (name's hash, number) -> source -> message
        self._inbox: defaultdict[tuple[int, int], dict[int, Words]] = defaultdict(dict)
        #: started, and not taken: what was given up by all ranks together stays here
        self._awaited: set[tuple[int, int]] = set()
        self._arriving: list[tuple[Any, int, tuple[int, int], Words]] = []
        self._leaving: list[tuple[Any, Words]] = []
        self._numbers: defaultdict[int, int] = defaultdict(int)
        self._header = np.empty(_HEADER, np.int32)
        self._next = self._await_header()
        _made.append(self)

    def start(self, request: Exchange, name: str, rank: int) -> _MpiHandle:
        """Sends at once, and does not wait; see `horovod_sparse.collectives.Exchange`."""
        self.progress()
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        hashed = int.from_bytes(digest, "little")
        key = hashed, self._numbers[hashed]
        self._numbers[hashed] = (key[1] + 1) & 0x7FFFFFFF
        late = {other: self._inbox.pop(other) for other in [*self._inbox] if self._is_before(other, key)}
        given_up = {other for other in self._awaited if self._is_before(other, key)}
        self._awaited -= given_up
        strangers = sorted({source for other in late.keys() - given_up for source in late[other]})
        if strangers:
            raise CollectiveMismatchError(
                f"{name}: rank {rank} did not await messages that ranks {strangers} sent to it too"
            )
        self._awaited.add(key)
        sends = []
        for peer, buffer in request.sends.items():
            if peer == rank:
                self._inbox[key][rank] = buffer.copy()
                continue
            header = np.empty(_HEADER, np.int32)
            header[:2] = np.frombuffer(digest, np.int32)
            header[2:] = key[1], buffer.size
            sends.append(self._send(header, peer, _HEADER_TAG))
            if buffer.size:
                sends.append(self._send(np.ascontiguousarray(buffer), peer, _BODY_TAG))
        return _MpiHandle(self, sends, key, request.sources, f"{name}: rank {rank}")

    @staticmethod
    def _is_before(other: tuple[int, int], key: tuple[int, int]) -> bool:
        """Whether it is an exchange of the same name, used before."""
        return other[0] == key[0] and other[1] < key[1]

    def _send(self, words: Words, peer: int, tag: int) -> Any:
        request = self._comm.Isend([words, self._mpi.INT], dest=peer, tag=tag)
        self._leaving.append((request, words))  # their memory may go only when they are complete
        return request

    def _await_header(self) -> Any:
        return self._comm.Irecv([self._header, self._mpi.INT], self._mpi.ANY_SOURCE, _HEADER_TAG)

    def is_known(self) -> bool:
        """Whether MPI still runs."""
        return not self._mpi.Is_finalized()

    def progress(self) -> None:
        """Takes in whatever has arrived, without waiting."""
        status = self._mpi.Status()
        while self._next.Test(status):
            # bodies of one source come in the order of their headers
            source, words = status.Get_source(), np.empty(int(self._header[3]), np.int32)
            key = int.from_bytes(self._header[:2].tobytes(), "little"), int(self._header[2])
            self._next = self._await_header()
            if words.size:
                body = self._comm.Irecv([words, self._mpi.INT], source, _BODY_TAG)
                self._arriving.append((body, source, key, words))
            else:
                self._inbox[key][source] = words
        still = []
        for body, source, key, words in self._arriving:
            if body.Test():
                self._inbox[key][source] = words
            else:
                still.append((body, source, key, words))
        self._arriving = still
        if self._leaving:
            self._leaving = [(request, words) for request, words in self._leaving if not request.Test()]

    def arrived(self, key: tuple[int, int]) -> dict[int, Words]:
        """What is there of an exchange."""
        return self._inbox.get(key, {})

    def take(self, key: tuple[int, int]) -> dict[int, Words]:
        """The messages of an exchange that has ended."""
        self._awaited.discard(key)
        return self._inbox.pop(key, {})

    def close(self) -> None:
        """Awaits nothing any more: MPI must not end with a message awaited."""
        if self.is_known():
            self._next.Cancel()
            self._next.Wait()


class _Handle(Protocol):
    """An exchange under way; see `horovod_sparse.pytorch.driver.Handle`."""

    def is_known(self) -> bool: ...
    def done(self) -> bool: ...
    def result(self) -> Any: ...


class Rounds:
    """A collective under way as messages between pairs; see `by_exchanges`.

    Args:
        start: starts an exchange under a name, and does not wait.
        request: any.
        name: the same on all ranks.
        rank: within those that take part.
        size: P.
    """

    def __init__(
        self,
        start: Callable[[Exchange, str], _Handle],
        request: Request,
        name: str,
        rank: int,
        size: int,
    ) -> None:
        self._begin, self._name = start, name
        self._steps = _alone(request) if isinstance(request, Exchange) else by_exchanges(request, rank, size)
        self._number, self._answer, self._ended = 0, None, False
        self._inner = self._start(next(self._steps))

    def _start(self, request: Request) -> _Handle:
        if not isinstance(request, Exchange):
            raise TypeError("collectives are made of exchanges alone")
        self._number += 1
        return self._begin(request, f"{self._name}/{self._number}")

    def is_known(self) -> bool:
        """Whether what carries the messages still runs."""
        return self._ended or self._inner.is_known()

    def done(self) -> bool:
        """Whether the last message is there; starts what comes after those that are."""
        while not self._ended and self._inner.done():
            try:
                self._inner = self._start(self._steps.send(self._inner.result()))
            except StopIteration as stop:
                self._answer, self._ended = stop.value, True
        return self._ended

    def result(self) -> Any:
        """What comes back for the request; waits for it."""
        while not self.done():
            time.sleep(_SLEEP_SECONDS)
        return self._answer


def _alone(request: Request) -> Synchronization[Any]:
    return (yield request)


@atexit.register
def _close_all() -> None:
    for pairs in _made:
        with contextlib.suppress(Exception):
            pairs.close()


class _MpiHandle:
    """One exchange under way."""

    def __init__(
        self, pairs: MpiPairs, sends: list[Any], key: tuple[int, int], sources: Sequence[int], whose: str
    ) -> None:
        self._pairs, self._sends, self._key = pairs, sends, key
        self._sources, self._whose = set(sources), whose

    def is_known(self) -> bool:
        return self._pairs.is_known()

    def done(self) -> bool:
        self._pairs.progress()
        # what was sent may be changed when this is done
        self._sends = [request for request in self._sends if not request.Test()]
        return not self._sends and self._sources <= self._pairs.arrived(self._key).keys()

    def result(self) -> dict[int, Words]:
        while not self.done():
            time.sleep(_SLEEP_SECONDS)
        messages = self._pairs.take(self._key)
        strangers = sorted(messages.keys() - self._sources)
        if strangers:
            raise CollectiveMismatchError(
                f"{self._whose} awaits messages from {sorted(self._sources)}, but {strangers} sent to it too"
            )
        return messages
