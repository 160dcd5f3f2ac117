"""Collectives made of messages between two ranks, and synchronizations of two levels made of those."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from horovod_sparse import collectives
from horovod_sparse.collectives import Request, Synchronization, Words
from horovod_sparse.errors import CollectiveMismatchError, UnknownNameError, UnsupportedError
from horovod_sparse.topology import Topology

_SLEEP_SECONDS = 20e-6
#: "auto": MPI carries messages between two ranks where it can; "pairs": it carries all rounds of sparsifiers;
#: "alltoall": Horovod carries everything. Equal on all ranks.
TRANSPORT_VARIABLE = "HOROVOD_SPARSE_TRANSPORT"
TRANSPORTS = ("auto", "alltoall", "pairs")


def transport_asked() -> str:
    wanted = os.environ.get(TRANSPORT_VARIABLE, "").strip() or "auto"
    if wanted not in TRANSPORTS:
        raise UnknownNameError(TRANSPORT_VARIABLE, wanted, TRANSPORTS)
    return wanted


def check_transport(hvd: Any) -> None:
    """Raises if the user asked for the transport "pairs" while Horovod runs on Gloo instead of MPI."""
    if transport_asked() == "pairs" and hvd.is_initialized() and not hvd.mpi_enabled():
        raise UnsupportedError(
            f"{TRANSPORT_VARIABLE}=pairs needs Horovod on MPI, and it runs on Gloo here: messages between "
            "pairs of ranks go over MPI alone. Unset it, or launch with horovodrun --mpi"
        )


def by_exchanges(request: Request, rank: int, size: int) -> Synchronization[Any]:
    """Carries out a collective by messages between pairs of ranks, in as few bytes as a ring would take."""
    if isinstance(request, collectives.Exchange):
        return (yield request)
    others = tuple(peer for peer in range(size) if peer != rank)
    if isinstance(request, collectives.AllGather):
        arrived = yield collectives.Exchange(dict.fromkeys(others, request.buffer), others)
        return np.concatenate([request.buffer if peer == rank else arrived[peer] for peer in range(size)])
    if isinstance(request, collectives.AllToAll):
        arrived = yield collectives.Exchange({peer: request.buffers[peer] for peer in others}, others)
        return [request.buffers[peer].copy() if peer == rank else arrived[peer] for peer in range(size)]
    if isinstance(request, collectives.Broadcast):
        words = np.ascontiguousarray(request.buffer).view(np.int32)
        if request.root == rank:
            yield collectives.Exchange(dict.fromkeys(others, words), ())
            return request.buffer.copy()
        arrived = yield collectives.Exchange({}, (request.root,))
        return _as_numbers(request.buffer, arrived, request.root)
    parts = np.array_split(request.buffer, size)
    arrived = yield collectives.Exchange({peer: parts[peer].view(np.int32) for peer in others}, others)
    total = np.zeros_like(parts[rank])
    for peer in range(size):
        total += parts[rank] if peer == rank else _as_numbers(parts[rank], arrived, peer)
    if isinstance(request, collectives.ReduceScatter):
        return total
    arrived = yield collectives.Exchange(dict.fromkeys(others, total.view(np.int32)), others)
    return np.concatenate(
        [total if peer == rank else _as_numbers(parts[peer], arrived, peer) for peer in range(size)]
    )


def _as_numbers(expected: np.ndarray, arrived: Mapping[int, np.ndarray], peer: int) -> np.ndarray:
    """Returns a message as an array of `expected`'s dtype; raises if its length is not `expected`'s."""
    words = arrived[peer]
    if words.nbytes != expected.nbytes:
        raise CollectiveMismatchError(
            f"rank {peer} sent {words.nbytes} bytes where this rank has {expected.nbytes}: all ranks have to "
            "give the same length"
        )
    return words.view(expected.dtype)


def over_hosts(coroutine: Synchronization[Any], topology: Topology, rank: int) -> Synchronization[Any]:
    """Carries out a coroutine's collectives within and across hosts by messages between pairs of ranks."""

    def carry(request: Request) -> Synchronization[Any]:
        if request.level == "all":
            return collectives.single_request(request)
        return among(request, topology.group(request.level, rank), rank)

    return collectives.translate_requests(coroutine, carry)


def among(request: Request, ranks: Sequence[int], rank: int) -> Synchronization[Any]:
    """Carries out a collective of some ranks by messages between pairs; a single rank sends none."""
    places = {peer: number for number, peer in enumerate(ranks)}

    def carry(exchange: Any) -> Synchronization[Any]:
        if len(ranks) == 1:
            return answer_for_one_rank(exchange)
        sends = {ranks[peer]: words for peer, words in exchange.sends.items()}
        arrived = yield collectives.Exchange(sends, tuple(ranks[peer] for peer in exchange.sources))
        return {places[peer]: words for peer, words in arrived.items()}

    steps = by_exchanges(replace(request, level="all"), places[rank], len(ranks))
    return collectives.translate_requests(steps, carry)


def answer_for_one_rank(request: Request) -> Any:
    """Returns a collective's result where one rank takes part: a copy of its buffer, or the buffer."""
    if isinstance(request, collectives.Exchange):
        return {peer: request.sends[peer].copy() for peer in request.sources}
    if isinstance(request, collectives.AllToAll):
        return [buffer.copy() for buffer in request.buffers]
    buffer: Any = request.buffer
    if isinstance(request, collectives.ReduceScatter):
        return buffer
    return buffer.clone() if hasattr(buffer, "clone") else buffer.copy()  # a tensor's copy is a clone


def rounds_over_hosts(rounds: Sequence[type[Request]], topology: Topology) -> tuple[type[Request], ...]:
    """Returns the kinds of request that `over_hosts` yields for a bucket of two levels."""
    inside, between = 2, sum(2 if kind is collectives.AllReduce else 1 for kind in rounds)
    number = inside * (topology.per_host > 1) + between * (topology.num_hosts > 1)
    return (collectives.Exchange,) * number


def as_alltoall(request: collectives.Exchange, size: int) -> list[np.ndarray]:
    """Returns an exchange as an all-to-all, with empty messages for other ranks: Horovod has no send."""
    nothing = np.empty(0, np.int32)
    return [request.sends.get(peer, nothing) for peer in range(size)]


def inbox(request: collectives.Exchange, messages: Sequence[np.ndarray], whose: str) -> dict[int, np.ndarray]:
    """Returns, of all ranks' messages, those of an exchange's sources; raises if another is not empty."""
    came = {peer: one for peer, one in enumerate(messages) if one.size or peer in request.sources}
    return checked_sources(came, request.sources, whose)


def checked_sources(messages: dict[int, Words], sources: Collection[int], whose: str) -> dict[int, Words]:
    """Returns the messages, or raises if a rank outside `sources` sent one; `whose` names the exchange."""
    if strangers := sorted(messages.keys() - set(sources)):
        raise CollectiveMismatchError(
            f"{whose} expected messages from ranks {sorted(sources)}, but ranks {strangers} sent some, too"
        )
    return messages


class Handle(Protocol):
    """Protocol of a collective in flight."""

    def done(self) -> bool | None:
        """True once `result` need not wait; None if the library that carries it was shut down meanwhile."""

    def result(self) -> Any:
        """Waits for the collective, and returns its result; called once."""


class Rounds:
    """A collective in flight that consists of several exchanges, which `start` begins one after the other."""

    def __init__(
        self, start: Callable[[Any, str], Handle], exchanges: Generator[Any, Any, Any], name: str
    ) -> None:
        self._begin, self._steps, self._name = start, exchanges, name
        self._number, self._answer, self._ended = 0, None, False
        self._error: Exception | None = None
        self._inner: Handle | None = None
        self.done()

    def done(self) -> bool | None:
        """Begins the next exchange once the last arrived; True after all. `result` raises the errors."""
        while not self._ended:
            try:
                if self._inner is not None and not (done := self._inner.done()):
                    return done
                exchange = self._steps.send(None if self._inner is None else self._inner.result())
                self._number += 1
                self._inner = self._begin(exchange, f"{self._name}/{self._number}")
            except StopIteration as stop:
                self._answer, self._ended = stop.value, True
            except Exception as error:
                self._error, self._ended = error, True
        return True

    def result(self) -> Any:
        while self.done() is False:
            time.sleep(_SLEEP_SECONDS)
        if self._error is not None:
            raise self._error
        return self._answer


def answer_at_once(answer: Any) -> Synchronization[Any]:
    """Returns a coroutine that returns `answer` without a collective."""
    yield from ()
    return answer
