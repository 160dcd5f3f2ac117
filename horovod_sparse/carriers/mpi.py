"""MPI beside Horovod: carries messages between two ranks, and all other requests as such messages.

Horovod has no send. Its all-to-all does the same, but each round of it takes a cycle of Horovod's (1 ms by
default); a message of MPI takes microseconds. MPI's own collectives cannot serve: MPI matches them by the
order of their start, and each rank starts buckets and their rounds in an order of its own.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from horovod_sparse.carriers import exchanges
from horovod_sparse.collectives import Exchange, Request, Words
from horovod_sparse.errors import CollectiveMismatchError


def why_not_mpi(hvd: Any) -> str:
    """Returns why this rank cannot send messages by MPI beside Horovod; empty if it can."""
    exchanges.check_transport(hvd)
    if exchanges.transport_asked() == "alltoall":
        return f"{exchanges.TRANSPORT_VARIABLE} says so"
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
        is_current: false once Horovod was started again; what is under way then is dropped.
    """

    def __init__(self, ranks: Sequence[int], is_current: Callable[[], bool]) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        world = self._mpi.COMM_WORLD.Get_group()
        self._comm = self._mpi.COMM_WORLD.Create_group(world.Incl(list(ranks)))
        self._rank, self._size = self._comm.Get_rank(), self._comm.Get_size()
        self._is_current, self._carries_all = is_current, exchanges.transport_asked() == "pairs"
        self._epoch, self._numbers = 0, Counter[bytes]()
        #: messages by source
        self._inbox: defaultdict[Key, dict[int, Words]] = defaultdict(dict)
        #: exchanges in progress
        self._open = set[Key]()
        self._arriving: list[tuple[Any, int, Key, Words]] = []
        #: MPI reads the memory of messages until their requests are complete
        self._leaving: dict[Key, list[tuple[Any, Words]]] = {}
        self._header = np.empty(_HEADER, np.int32)
        self._next = self._start_receive()
        atexit.register(self._close)  # and keeps the memory that MPI may still use

    def carries(self, request: Request) -> bool:
        """True for messages between pairs, and with the transport "pairs" for all but sums of tensors."""
        on_host = isinstance(getattr(request, "buffer", self._header), np.ndarray)
        return isinstance(request, Exchange) or (self._carries_all and on_host)

    def start(self, request: Request, name: str) -> exchanges.Handle:
        """Starts a collective and returns at once; `name` is equal on all ranks."""
        return exchanges.Rounds(self._exchange, exchanges.by_exchanges(request, self._rank, self._size), name)

    def forget(self) -> None:
        """Drops all messages in flight; all ranks call it after a failure, wherever each rank stopped."""
        self._epoch += 1
        self._numbers.clear()
        self._open.clear()
        for key in [key for key in self._inbox if key[0] < self._epoch]:
            del self._inbox[key]

    def _exchange(self, request: Exchange, name: str) -> _Messages:
        self._progress()
        whose, digest = f"{name}: rank {self._rank}", hashlib.blake2b(name.encode(), digest_size=8).digest()
        number = self._numbers[digest]
        self._numbers[digest] += 1
        key, before = (self._epoch, digest, number), (self._epoch, digest, number - 1)
        late = self._inbox.pop(before, {})
        if late and before not in self._open:
            raise CollectiveMismatchError(
                f"{whose} received messages from ranks {sorted(late)} that it does not expect"
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

    def _start_receive(self) -> Any:
        return self._comm.Irecv([self._header, self._mpi.INT], self._mpi.ANY_SOURCE, _HEADER_TAG)

    def _progress(self) -> None:
        """Receives the messages that have arrived, without waiting for others."""
        status = self._mpi.Status()
        while self._next.Test(status):
            source, words = status.Get_source(), np.empty(int(self._header[4]), np.int32)
            key = int(self._header[0]), self._header[1:3].tobytes(), int(self._header[3])
            self._next = self._start_receive()
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
    """The messages that one exchange sends and receives."""

    carrier: MpiCarrier
    key: Key
    sources: frozenset[int]
    whose: str

    def done(self) -> bool | None:
        """True once all messages arrived and the sent buffers may change; None if they were dropped."""
        at = self.carrier
        if not at._is_current() or at._mpi.Is_finalized():
            return None
        at._progress()
        return self.key not in at._leaving and self.sources <= at._inbox.get(self.key, {}).keys()

    def result(self) -> dict[int, Words]:
        self.carrier._open.discard(self.key)
        return exchanges.checked_sources(self.carrier._inbox.pop(self.key, {}), self.sources, self.whose)
