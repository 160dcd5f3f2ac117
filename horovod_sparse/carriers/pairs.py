"""Messages between two ranks: which way they go, many exchanges at once, and MPI, which carries them."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.collectives import Exchange, Request, shared_lines
from horovod_sparse.errors import CollectiveMismatchError, UnknownNameError, UnsupportedError

#: "auto": messages between pairs over MPI, where there is MPI; "alltoall": over Horovod's all-to-all;
#: "pairs": all rounds of sparsifiers are such messages over MPI. The same on all ranks.
TRANSPORT_VARIABLE = "HOROVOD_SPARSE_TRANSPORT"
WAYS = ("auto", "alltoall", "pairs")

_log = logging.getLogger("horovod_sparse")
#: what was warned of
_warned: set[str] = set()


def transport_asked() -> str:
    wanted = os.environ.get(TRANSPORT_VARIABLE, "").strip() or "auto"
    if wanted not in WAYS:
        raise UnknownNameError(TRANSPORT_VARIABLE, wanted, WAYS)
    return wanted


def rounds_by_pairs() -> bool:
    """Whether all rounds of sparsifiers are to travel as messages between pairs of ranks."""
    return transport_asked() == "pairs"


def check_transport(hvd: Any) -> None:
    """Refuses what the environment asks for, where this launch cannot do it; `hvd` is Horovod's binding."""
    if rounds_by_pairs() and hvd.is_initialized() and not hvd.mpi_enabled():
        raise UnsupportedError(
            f"{TRANSPORT_VARIABLE}=pairs needs Horovod on MPI, and it runs on Gloo here: messages between "
            "pairs of ranks go over MPI alone. Unset it, or launch with horovodrun --mpi"
        )


def usable_mpi(hvd: Any) -> tuple[Any, str]:
    """mpi4py's MPI, if this rank can use it beside Horovod; or None and why it cannot."""
    check_transport(hvd)
    if transport_asked() == "alltoall":
        return None, f"{TRANSPORT_VARIABLE} says so"
    if not hvd.mpi_enabled():
        return None, "Horovod does not run on MPI"
    if not hvd.mpi_threads_supported():
        return None, "MPI does not support several threads"
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        return None, f"mpi4py cannot be imported: {error}"
    world, rank, size = mpi.COMM_WORLD, hvd.rank(), hvd.size()
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        counted = f"MPI counts rank {world.Get_rank()} of {world.Get_size()}"
        return None, f"{counted}, Horovod rank {rank} of {size}"
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return None, "MPI was not started for several threads"
    return mpi, ""


@dataclass(frozen=True)
class Blocking:
    """Work that waits for other ranks: a hook of a backward pass must not do it itself."""

    work: Callable[[], Any]


@dataclass(frozen=True)
class TransportChoice:
    """How messages between two ranks travel: what carries them, None for Horovod; in words, and why so."""

    pairs: MpiPairs | None
    words: str


#: yields requests, and work that blocks
Agreement: TypeAlias = Generator[Request | Blocking, Any, TransportChoice]


def agreed_transport(hvd: Any, process_set: Any, number: int) -> Agreement:
    """What all ranks can use, and then whether all have reached all, in the agreement of this number."""
    mpi, reason = usable_mpi(hvd)
    rank = int(process_set.rank())
    if refused := _first_reason((yield from shared_lines(reason)), rank):
        return by_horovod(refused, rank)
    pairs, failure = yield Blocking(lambda: _connected(mpi, process_set.ranks, number))
    if refused := _first_reason((yield from shared_lines(failure)), rank):
        return by_horovod(refused, rank, failed=True)
    chosen = TransportChoice(pairs, "MPI, on a communicator of their own (every rank can)")
    _log.info("messages between two ranks go through %s", chosen.words)
    return chosen


def by_horovod(reason: str, rank: int, *, failed: bool = False) -> TransportChoice:
    """Horovod's all-to-all, and why so; warns once, on one rank, where that is not what was asked for."""
    words = f"Horovod's all-to-all ({reason})"
    if (failed or rounds_by_pairs()) and rank == 0 and words not in _warned:
        _warned.add(words)
        _log.warning("rounds go through %s, though %s=%s", words, TRANSPORT_VARIABLE, transport_asked())
    else:
        _log.info("messages between two ranks go through %s", words)
    return TransportChoice(None, words)


def _first_reason(reasons: list[str], rank: int) -> str:
    """This rank's own, if it has one, or that of the first that has; empty if none has."""
    others = (f"rank {other}: {reason}" for other, reason in enumerate(reasons) if reason)
    return reasons[rank] or next(others, "")


def _connected(mpi: Any, ranks: list[int], number: int) -> tuple[MpiPairs | None, str]:
    """A communicator of these ranks, or None and why there is none."""
    try:
        return MpiPairs(mpi, ranks, tag=number), ""
    except Exception as error:  # told to all ranks, which then do without
        return None, f"{type(error).__name__}: {error}"


Words: TypeAlias = NDArray[np.int32]
#: a hash of an exchange's name, and how often that name was used before
Key: TypeAlias = tuple[int, int]

#: words in front of every message: its key, in three, and what its carrier needs to know
HEADER = 4
_SLEEP_SECONDS = 20e-6


class Pairs(ABC):
    """Sends and receives for many exchanges at once; one thread at a time uses it.

    A header goes in front of every message and is taken in as it arrives, whoever it is for; it says to which
    exchange the message belongs, by a hash of its name and, of several of one name, its number. So no rank
    waits for a message in particular, and ranks start exchanges in any order.
    """

    def __init__(self) -> None:
        #: source -> message
        self._inbox: defaultdict[Key, dict[int, Words]] = defaultdict(dict)
        #: started, and not taken: what was given up by all ranks together stays here
        self._awaited: set[Key] = set()
        self._numbers: defaultdict[int, int] = defaultdict(int)

    def start(self, request: Exchange, name: str, rank: int) -> _Handle:
        """Sends at once, and does not wait. The name is the same on all ranks, `rank` is of this process."""
        self.progress()
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        hashed = int.from_bytes(digest, "little")
        key = hashed, self._numbers[hashed]
        self._numbers[hashed] = (key[1] + 1) & 0x7FFFFFFF
        late = {other: self._inbox.pop(other) for other in [*self._inbox] if _is_before(other, key)}
        given_up = {other for other in self._awaited if _is_before(other, key)}
        self._awaited -= given_up
        strangers = sorted({source for other in late.keys() - given_up for source in late[other]})
        if strangers:
            raise CollectiveMismatchError(
                f"{name}: rank {rank} did not await messages that ranks {strangers} sent to it too"
            )
        self._awaited.add(key)
        sends = list[Any]()
        for peer, buffer in request.sends.items():
            if peer == rank:
                self._inbox[key][rank] = buffer.copy()
                continue
            header = np.empty(HEADER, np.int32)
            header[:2] = np.frombuffer(digest, np.int32)
            header[2] = key[1]
            sends += self._send(peer, header, np.ascontiguousarray(buffer))
        return _Handle(self, sends, key, request.sources, f"{name}: rank {rank}")

    @abstractmethod
    def _send(self, peer: int, header: Words, message: Words) -> Sequence[Any]:
        """Sends without waiting; what comes back is to be asked (`Test`) before the words may change."""

    @abstractmethod
    def progress(self) -> None:
        """Takes in whatever has arrived, without waiting."""

    @abstractmethod
    def is_known(self) -> bool:
        """Whether what carries the messages still runs."""

    @staticmethod
    def _key_in(header: Words) -> Key:
        return int.from_bytes(header[:2].tobytes(), "little"), int(header[2])

    def arrived(self, key: Key) -> dict[int, Words]:
        return self._inbox.get(key, {})

    def take(self, key: Key) -> dict[int, Words]:
        self._awaited.discard(key)
        return self._inbox.pop(key, {})


def _is_before(other: Key, key: Key) -> bool:
    """Whether it is an exchange of the same name, used before."""
    return other[0] == key[0] and other[1] < key[1]


class _Handle:
    """One exchange under way."""

    def __init__(self, pairs: Pairs, sends: list[Any], key: Key, sources: Sequence[int], whose: str) -> None:
        self._pairs, self._sends, self._key = pairs, sends, key
        self._sources, self._whose = set(sources), whose
        self._error: Exception | None = None

    def done(self) -> bool | None:
        """Raises nothing, since hooks of a backward pass ask; `result` does."""
        if not self._pairs.is_known():
            return None
        try:
            self._pairs.progress()
            # what was sent may be changed when this is done
            self._sends = [request for request in self._sends if not request.Test()]
            missing = self._sources - self._pairs.arrived(self._key).keys()
        except Exception as error:
            self._error = error
        return self._error is not None or not (self._sends or missing)

    def result(self) -> dict[int, Words]:
        while self.done() is False:
            time.sleep(_SLEEP_SECONDS)
        if self._error is not None:
            raise self._error
        messages = self._pairs.take(self._key)
        strangers = sorted(messages.keys() - self._sources)
        if strangers:
            raise CollectiveMismatchError(
                f"{self._whose} awaits messages from {sorted(self._sources)}, but {strangers} sent to it too"
            )
        return messages


_HEADER_TAG, _BODY_TAG = 1, 2

#: all that were made: MPI may still use their memory when nobody else does
_made: list[MpiPairs] = []


class MpiPairs(Pairs):
    """Messages over MPI. Making one waits until all ranks of the set do; the tag is the same on all.

    The length in a header says how much memory its message needs. (Probing needs no header, but is not sound
    in every MPI where several threads communicate, and Horovod's thread does.)
    """

    def __init__(self, mpi: Any, ranks: Sequence[int], tag: int = 0) -> None:
        super().__init__()
        self._mpi = mpi
        world = mpi.COMM_WORLD.Get_group()
        self._comm = mpi.COMM_WORLD.Create_group(world.Incl(list(ranks)), tag=tag)
        world.Free()
        self._arriving: list[tuple[Any, int, Key, Words]] = []
        self._leaving: list[tuple[Any, Words]] = []
        self._header = np.empty(HEADER, np.int32)
        self._next = self._await_header()
        _made.append(self)

    def _send(self, peer: int, header: Words, message: Words) -> Sequence[Any]:
        header[3] = message.size
        sends = [self._start_send(header, peer, _HEADER_TAG)]
        if message.size:
            sends.append(self._start_send(message, peer, _BODY_TAG))
        return sends

    def _start_send(self, words: Words, peer: int, tag: int) -> Any:
        request = self._comm.Isend([words, self._mpi.INT], dest=peer, tag=tag)
        self._leaving.append((request, words))  # their memory may go only when they are complete
        return request

    def _await_header(self) -> Any:
        return self._comm.Irecv([self._header, self._mpi.INT], self._mpi.ANY_SOURCE, _HEADER_TAG)

    def is_known(self) -> bool:
        return not self._mpi.Is_finalized()

    def progress(self) -> None:
        status = self._mpi.Status()
        while self._next.Test(status):
            # bodies of one source come in the order of their headers
            source, words = status.Get_source(), np.empty(int(self._header[3]), np.int32)
            key = self._key_in(self._header)
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

    def close(self) -> None:
        """Awaits nothing any more: MPI must not end with a message awaited."""
        if self.is_known():
            self._next.Cancel()
            self._next.Wait()


@atexit.register
def _close_all() -> None:
    for pairs in _made:
        with contextlib.suppress(Exception):
            pairs.close()
