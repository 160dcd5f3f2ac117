"""Many exchanges at once between pairs of ranks, whatever carries their messages."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.collectives import Exchange
from horovod_sparse.errors import CollectiveMismatchError

Words: TypeAlias = NDArray[np.int32]
#: a hash of an exchange's name, and how often that name was used before
Key: TypeAlias = tuple[int, int]

#: words in front of every message: its key, in three, and what its carrier needs to know
HEADER = 4
_SLEEP_SECONDS = 20e-6


class Pairs(ABC):
    """Sends and receives for many exchanges at once.

    A header goes in front of every message and is taken in as it arrives, whoever it is for; a hash of the
    exchange's name in it says to whom the message belongs. So no rank waits for a message in particular, and
    the order in which ranks start exchanges is free. Several exchanges of one name, one behind the other, are
    told apart by their number.

    One thread at a time uses it.
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
        """What is there of an exchange."""
        return self._inbox.get(key, {})

    def take(self, key: Key) -> dict[int, Words]:
        """The messages of an exchange that has ended."""
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

    def is_known(self) -> bool:
        return self._pairs.is_known()

    def done(self) -> bool:
        """Raises nothing, since hooks of a backward pass ask; `result` does."""
        try:
            self._pairs.progress()
            # what was sent may be changed when this is done
            self._sends = [request for request in self._sends if not request.Test()]
            missing = self._sources - self._pairs.arrived(self._key).keys()
        except Exception as error:
            self._error = error
        return self._error is not None or not (self._sends or missing)

    def result(self) -> dict[int, Words]:
        while not self.done():
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
