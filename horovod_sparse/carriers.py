"""Messages between pairs of ranks, collectives made of them, and MPI beside Horovod, which carries them.

Horovod has no send. Its all-to-all does the same, but each round of it takes a cycle of Horovod's (1 ms by
default); a message of MPI takes microseconds. MPI's own collectives cannot serve: MPI matches them by the
order of their start, and each rank starts buckets and their rounds in an order of its own.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from horovod_sparse import collectives, errors
from horovod_sparse.collectives import AllGather, Exchange, Request, Synchronization, Words
from horovod_sparse.errors import CollectiveMismatchError
from horovod_sparse.topology import Topology
from horovod_sparse.training.engine import Batch, Handle, answer_for_one_rank
from horovod_sparse.training.settings import TRANSPORT_VARIABLE, check_transport, requested_transport

#: bytes times ranks up to which each rank sends to all, in one latency; bytes from which a sum goes alone
_TINY, _SMALL = 2**18, 2**22
#: errors that all ranks raise after the same messages, so that later ones still match
_OF_STEPS = errors.NonFiniteGradientError, errors.EditedGradientError, errors.StateMismatchError
COLLECTIVE_ERRORS = *_OF_STEPS, errors.CheckpointError


def answer_by_exchanges(request: Request, rank: int, size: int) -> Synchronization[Any]:
    """Carries out a collective by messages between pairs of ranks, in as few bytes as a ring would take."""
    if isinstance(request, Exchange):
        return (yield request)
    others = tuple(peer for peer in range(size) if peer != rank)
    if isinstance(request, AllGather):
        arrived = yield Exchange(dict.fromkeys(others, request.buffer), others)
        return np.concatenate([request.buffer if peer == rank else arrived[peer] for peer in range(size)])
    if isinstance(request, collectives.AllToAll):
        arrived = yield Exchange({peer: request.buffers[peer] for peer in others}, others)
        return [request.buffers[peer].copy() if peer == rank else arrived[peer] for peer in range(size)]
    if isinstance(request, collectives.Broadcast):
        words = np.ascontiguousarray(request.buffer).view(np.int32)
        if request.root == rank:
            yield Exchange(dict.fromkeys(others, words), ())
            return request.buffer.copy()
        arrived = yield Exchange({}, (request.root,))
        return _as_numbers(request.buffer, arrived, request.root)
    parts = np.array_split(request.buffer, size)
    arrived = yield Exchange({peer: parts[peer].view(np.int32) for peer in others}, others)
    total = np.zeros_like(parts[rank])
    for peer in range(size):
        total += parts[rank] if peer == rank else _as_numbers(parts[rank], arrived, peer)
    if isinstance(request, collectives.ReduceScatter):
        return total
    arrived = yield Exchange(dict.fromkeys(others, total.view(np.int32)), others)
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


def side_by_side(batch: Batch, size: int) -> Synchronization[None]:
    """Runs tasks round by round: all-gathers and tiny sums of a round share a message, and so do small sums.

    An error of `COLLECTIVE_ERRORS` stays in its task. Any other ends all: this rank's messages would no
    longer be those that others expect.
    """
    answers: dict[int, Any] = dict.fromkeys(range(len(batch)))
    gather = functools.partial(_gather_tiny_sum, size=size)
    coroutines = [collectives.translate_requests(one, gather) for _, one in batch]
    while answers:
        requests: dict[int, Request] = {}
        for number in sorted(answers):  # messages have tasks in this order
            task, _ = batch[number]
            try:
                requests[number] = coroutines[number].send(answers[number])
            except StopIteration as stop:
                task.result = stop.value
            except COLLECTIVE_ERRORS as error:
                task.error = error
        answers = {}
        if len(batch) > 1:
            shared = {number: one for number, one in requests.items() if one.level == "all"}
            own = {number: one.buffer for number, one in shared.items() if isinstance(one, AllGather)}
            answers |= (yield from _gather_as_one_message(own, len(batch))) if own else {}
            answers |= yield from _sum_as_one_message(shared)
        for number in sorted(requests.keys() - answers.keys()):
            answers[number] = yield requests[number]


def _gather_tiny_sum(request: Request, size: int) -> Synchronization[Any]:
    """Answers an all-reduce of few numbers by an all-gather; any other request by itself."""
    own = request.buffer if isinstance(request, collectives.AllReduce) and request.level == "all" else None
    if not isinstance(own, np.ndarray) or not 0 < own.nbytes * size <= _TINY or own.nbytes % 4:
        return (yield request)
    everyone = yield AllGather(np.ascontiguousarray(own).view(np.int32))
    with np.errstate(all="ignore"):  # a gradient may overflow on each rank
        return everyone.view(own.dtype).reshape(-1, own.size).sum(axis=0)


def _gather_as_one_message(own: Mapping[int, Words], num_tasks: int) -> Synchronization[dict[int, Words]]:
    """Gathers buffers {task number: buffer} of all ranks by one message; returns each task's answer."""
    lengths = np.array([own[task].size if task in own else 0 for task in range(num_tasks)], np.int32)
    words, of_ranks = (yield AllGather(np.concatenate([lengths, *own.values()]))), []
    while words.size:
        ends = num_tasks + np.cumsum(words[:num_tasks])
        of_ranks.append(np.split(words[: ends[-1]], [num_tasks, *ends[:-1]])[1:])
        words = words[ends[-1] :]
    return {task: np.concatenate([buffers[task] for buffers in of_ranks]) for task in own}


def _sum_as_one_message(requests: Mapping[int, Request]) -> Synchronization[dict[int, np.ndarray]]:
    """Answers the all-reduces of small host arrays among the requests, by one collective for each dtype."""
    sums: dict[Any, dict[int, np.ndarray]] = defaultdict(dict)
    asked = {task: one.buffer for task, one in requests.items() if isinstance(one, collectives.AllReduce)}
    for task, buffer in asked.items():
        if isinstance(buffer, np.ndarray) and buffer.nbytes < _SMALL:
            sums[buffer.dtype][task] = buffer
    answers: dict[int, np.ndarray] = {}
    for buffers in sums.values():
        total = yield collectives.AllReduce(np.concatenate([*buffers.values()]))
        ends = np.cumsum([one.size for one in buffers.values()])
        answers |= zip(buffers, np.split(total, ends[:-1]), strict=True)
    return answers


def run_over_hosts(coroutine: Synchronization[Any], topology: Topology, rank: int) -> Synchronization[Any]:
    """Runs a coroutine; its requests within or across hosts are answered by messages between pairs."""

    def carry(request: Request) -> Synchronization[Any]:
        if request.level == "all":
            return collectives.single_request(request)
        return answer_among(request, topology.group(request.level, rank), rank)

    return collectives.translate_requests(coroutine, carry)


def answer_among(request: Request, ranks: Sequence[int], rank: int) -> Synchronization[Any]:
    """Answers a collective of `ranks` only, by messages between pairs of them; a single rank sends none."""
    if len(ranks) == 1:
        return answer_for_one_rank(request)
    places = {peer: number for number, peer in enumerate(ranks)}

    def carry(exchange: Any) -> Synchronization[Any]:
        sends = {ranks[peer]: words for peer, words in exchange.sends.items()}
        arrived = yield Exchange(sends, tuple(ranks[peer] for peer in exchange.sources))
        return {places[peer]: words for peer, words in arrived.items()}

    steps = answer_by_exchanges(replace(request, level="all"), places[rank], len(ranks))
    return (yield from collectives.translate_requests(steps, carry))


def rounds_over_hosts(rounds: Sequence[type[Request]], topology: Topology) -> tuple[type[Request], ...]:
    """Returns the requests of a two-level bucket by `run_over_hosts`, from those of its sparsifier."""
    inside, between = 2, sum(2 if kind is collectives.AllReduce else 1 for kind in rounds)
    number = inside * (topology.per_host > 1) + between * (topology.num_hosts > 1)
    return (Exchange,) * number


def as_alltoall(request: Exchange, size: int) -> list[np.ndarray]:
    """Returns the messages of an exchange as an all-to-all sends them: empty ones to all other ranks."""
    nothing = np.empty(0, np.int32)
    return [request.sends.get(peer, nothing) for peer in range(size)]


def inbox(request: Exchange, messages: Sequence[np.ndarray], whose: str) -> dict[int, np.ndarray]:
    """Returns {source: message} from all ranks' messages; raises if one from another rank is not empty."""
    came = {peer: one for peer, one in enumerate(messages) if one.size or peer in request.sources}
    return checked_sources(came, request.sources, whose)


def checked_sources(messages: dict[int, Words], sources: Collection[int], whose: str) -> dict[int, Words]:
    """Returns the messages; raises an error that begins with `whose` if a rank outside `sources` sent one."""
    if strangers := sorted(messages.keys() - set(sources)):
        raise CollectiveMismatchError(
            f"{whose} expected messages from ranks {sorted(sources)}, but ranks {strangers} sent some, too"
        )
    return messages


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
        if self._error is not None:
            raise self._error
        return self._answer


def why_not_mpi(hvd: Any) -> str:
    """Returns why this rank cannot send messages by MPI beside Horovod; empty if it can."""
    check_transport(hvd)
    if requested_transport() == "alltoall":
        return f"{TRANSPORT_VARIABLE} says so"
    if not hvd.mpi_enabled():
        return "Horovod does not run on MPI"
    if not hvd.mpi_threads_supported():
        return "MPI does not support several threads"
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        return f"mpi4py cannot be imported: {error}"
    counted = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if counted != (hvd.rank(), hvd.size()):
        return f"MPI counts rank {counted[0]} of {counted[1]}, Horovod rank {hvd.rank()} of {hvd.size()}"
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return "MPI was not started for several threads"
    return ""


#: key of an exchange: number of `forget` calls, hash of its name, earlier uses of that name
Key: TypeAlias = tuple[int, bytes, int]

#: words before every message: its key, in four, and its length
_HEADER = 5
_HEADER_TAG, _BODY_TAG = 1, 2


class MpiCarrier:
    """Carries out collectives over an MPI communicator of its own; one thread at a time may use it.

    A header goes before every message, and is received by whichever exchange is asked first: it names the
    exchange, so ranks start exchanges in any order, and gives the length, for which memory is made. (Probing
    for messages would need no header, but has ended in a segmentation fault beside Horovod's thread.)

    Args:
        ranks: in the world, the same on all of them: all make their carriers together.
        is_current: returns False once Horovod was started again; messages in flight are dropped then.
    """

    def __init__(self, ranks: Sequence[int], is_current: Callable[[], bool]) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        world = self._mpi.COMM_WORLD.Get_group()
        self._comm = self._mpi.COMM_WORLD.Create_group(world.Incl(list(ranks)))
        self._rank, self._size = self._comm.Get_rank(), self._comm.Get_size()
        self._is_current, self._carries_all = is_current, requested_transport() == "pairs"
        self._epoch, self._numbers = 0, Counter[bytes]()
        #: messages by source
        self._inbox: defaultdict[Key, dict[int, Words]] = defaultdict(dict)
        #: exchanges in progress
        self._open = set[Key]()
        self._arriving: list[tuple[Any, int, Key, Words]] = []
        #: MPI reads the memory of messages until their requests are complete
        self._leaving: dict[Key, list[tuple[Any, Words]]] = {}
        self._header = np.empty(_HEADER, np.int32)
        self._next = self._start_header_receive()
        atexit.register(self._close)  # and keeps the memory that MPI may still use

    def carries(self, request: Request) -> bool:
        """True for messages between pairs, and with the transport "pairs" for all but sums of tensors."""
        on_host = isinstance(getattr(request, "buffer", self._header), np.ndarray)
        return isinstance(request, Exchange) or (self._carries_all and on_host)

    def start(self, request: Request, name: str) -> Handle:
        """Starts a collective and returns its handle at once; `name` is equal on all ranks."""
        return Rounds(self._exchange, answer_by_exchanges(request, self._rank, self._size), name)

    def forget(self) -> None:
        """Drops all messages in flight; all ranks call it after a failure, wherever each rank stopped."""
        self._epoch += 1
        self._numbers.clear()
        self._open.clear()
        for key in [key for key in self._inbox if key[0] < self._epoch]:
            del self._inbox[key]

    def _exchange(self, request: Exchange, name: str) -> _Messages:
        """Starts an exchange: sends this rank's messages; the handle that it returns receives the others'."""
        self._receive_arrived()
        whose, digest = f"{name}: rank {self._rank}", hashlib.blake2b(name.encode(), digest_size=8).digest()
        number = self._numbers[digest]
        self._numbers[digest] += 1
        key, before = (self._epoch, digest, number), (self._epoch, digest, number - 1)
        late = self._inbox.pop(before, {})
        if late and before not in self._open:
            raise CollectiveMismatchError(
                f"{whose} did not expect messages from ranks {sorted(late)}: ranks call different collectives"
            )
        self._open.discard(before)
        self._open.add(key)
        for peer, buffer in request.sends.items():
            if peer == self._rank:
                self._inbox[key][peer] = buffer.copy()
                continue
            words, header = np.ascontiguousarray(buffer), np.empty(_HEADER, np.int32)
            header[0], header[1:3] = self._epoch, np.frombuffer(digest, np.int32)
            header[3:] = number, words.size
            for part, tag in ((header, _HEADER_TAG), (words, _BODY_TAG)):
                if part.size:
                    sent = self._comm.Isend([part, self._mpi.INT], dest=peer, tag=tag)
                    self._leaving.setdefault(key, []).append((sent, part))
        return _Messages(self, key, frozenset(request.sources), whose)

    def _start_header_receive(self) -> Any:
        return self._comm.Irecv([self._header, self._mpi.INT], self._mpi.ANY_SOURCE, _HEADER_TAG)

    def _receive_arrived(self) -> None:
        """Receives the messages that have arrived, without waiting for others."""
        status = self._mpi.Status()
        while self._next.Test(status):
            source, words = status.Get_source(), np.empty(int(self._header[4]), np.int32)
            key = int(self._header[0]), self._header[1:3].tobytes(), int(self._header[3])
            self._next = self._start_header_receive()
            # bodies of one source come in the order of their headers
            body = self._mpi.REQUEST_NULL
            if words.size:
                body = self._comm.Irecv([words, self._mpi.INT], source, _BODY_TAG)
            self._arriving.append((body, source, key, words))
        arriving, self._arriving = self._arriving, []
        for body, source, key, words in arriving:
            if not body.Test():
                self._arriving.append((body, source, key, words))
            elif key[0] >= self._epoch:
                self._inbox[key][source] = words
        for key, sent in list(self._leaving.items()):
            if self._mpi.Request.Testall([request for request, _ in sent]):
                del self._leaving[key]

    def _close(self) -> None:
        """Cancels the messages in flight before MPI is finalized."""
        if not self._mpi.Is_finalized():
            self._next.Cancel()
            self._next.Wait()


@dataclass(frozen=True)
class _Messages:
    """The handle of one exchange over MPI: tells when its messages are done, returns the received ones."""

    carrier: MpiCarrier
    key: Key
    sources: frozenset[int]
    whose: str

    def done(self) -> bool | None:
        """True once all messages arrived and the sent buffers may change; None if they were dropped."""
        at = self.carrier
        if not at._is_current() or at._mpi.Is_finalized():
            return None
        at._receive_arrived()
        return self.key not in at._leaving and self.sources <= at._inbox.get(self.key, {}).keys()

    def result(self) -> dict[int, Words]:
        self.carrier._open.discard(self.key)
        return checked_sources(self.carrier._inbox.pop(self.key, {}), self.sources, self.whose)
