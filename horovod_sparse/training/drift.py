"""Whether parameters and optimizer state are still equal on all ranks: compared every so many steps.

What breaks that (a loop that changes parameters on one rank, a state that was loaded on one, memory that
flips a bit) breaks it without a word. So every N steps each rank digests what has to be equal at the speed of
memory, and all compare one number in one message; where it differs, they look for what does. What differs
from rank to rank by design (gradients, residuals, statistics of batches) nobody looks at.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.collectives import AllGather, Broadcast, Synchronization, shared_lines
from horovod_sparse.errors import DriftError
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.training.agreement import differences
from horovod_sparse.training.collective_errors import some_of
from horovod_sparse.training.settings import Settings

_log = logging.getLogger("horovod_sparse")

#: 64-bit words of a row; rows are added up. Sums this long stay in the first cache
COLUMNS = 512
_WORD_BYTES = 8


class Entry(Protocol):
    """Numbers that have to be equal on all ranks, their name, and in words their dtype and shape."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    def sums(self) -> NDArray[np.uint64]:
        """What `word_sums` gives of its bytes, on whatever device they are."""

    def read(self) -> NDArray[np.uint8]:
        """Its bytes, in C order: a view, or a copy."""

    def write(self, values: NDArray[np.uint8]) -> None:
        """Replaces them."""


@dataclass(frozen=True)
class HostEntry:
    """An `Entry` of an array in the host's memory."""

    name: str
    array: np.ndarray
    assign: Callable[[np.ndarray], Any]

    @property
    def kind(self) -> str:
        return f"{self.array.dtype.name}{list(self.array.shape)}"

    def sums(self) -> NDArray[np.uint64]:
        return word_sums(self.read())

    def read(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.array).reshape(-1).view(np.uint8)

    def write(self, values: NDArray[np.uint8]) -> None:
        self.assign(values.view(self.array.dtype).reshape(self.array.shape))


def word_sums(values: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Sums of every 512th of 64-bit words, modulo 2**64: one pass over the memory.

    One changed bit always shows; several do, unless they cancel out within 512 words' distance to the bit.
    """
    row = COLUMNS * _WORD_BYTES
    whole = values.size // row * row
    sums = np.add.reduce(values[:whole].view(np.uint64).reshape(-1, COLUMNS), axis=0, dtype=np.uint64)
    if whole < values.size:
        rest = np.zeros(row, np.uint8)
        rest[: values.size - whole] = values[whole:]
        sums = sums + rest.view(np.uint64)
    return np.asarray(sums, np.uint64)


class DriftCheck:
    """When one training compares, and what it does about what it finds.

    * "raise": `DriftError` on every rank, which names the first entry that differs, and the ranks.
    * "warn": the same in the log, once until something else differs.
    * "resync": what differs becomes what rank 0 has, on all ranks; counted in the telemetry, and in the log.

    Attributes:
        next_step: of the training, after which all compare; Inf for never.
    """

    def __init__(self, settings: Settings, telemetry: Telemetry) -> None:
        self.every, self.policy = settings.check_every or 0, settings.on_drift
        self._telemetry = telemetry
        self._known: frozenset[str] = frozenset()
        self.next_step = math.inf
        self.restart(0)

    def restart(self, step: int) -> None:
        """Ranks go on together from this step, and compare after the next: beginnings may differ."""
        self.next_step = step + 1 if self.every else math.inf

    def postpone(self, step: int) -> None:
        """All ranks stand at this step of the training: by it alone they know when to compare next."""
        self.next_step = (step // self.every + 1) * self.every if self.every else math.inf

    def run(self, step: int, rank: int, entries: Sequence[Entry]) -> Synchronization[None]:
        """Compares, between two steps; all ranks together."""
        self.postpone(step)
        differing = yield from differing_entries(entries)
        if not differing:
            self._known = frozenset()
            return
        self._telemetry.num_drifts += 1
        more = f"; {len(differing)} differ: {some_of(list(differing))}" if len(differing) > 1 else ""
        what = f"after step {step} {next(iter(differing.values()))}{more}"
        if self.policy == "raise":
            raise DriftError(what)
        if self.policy == "warn":
            if rank == 0 and not differing.keys() <= self._known:
                _log.warning("%s", DriftError(what))
            self._known = frozenset(differing)
            return
        by_name = {entry.name: entry for entry in entries}
        shared = yield from shared_lines({name: _kind(by_name.get(name)) for name in differing})
        if unlike := [name for name in differing if len({kinds[name] for kinds in shared}) > 1]:
            raise DriftError(f"{what}; {unlike[0]} has not the same type and shape on all ranks: it stays")
        for name in differing:
            yield from brought(by_name[name], 0)
        if rank == 0:
            _log.warning("%s; all ranks have what rank 0 has now", what)


def differing_entries(entries: Sequence[Entry]) -> Synchronization[dict[str, str]]:
    """What differs, in words, by name: one message, and one more where something does."""
    digests = {entry.name: _digest(entry.kind.encode(), entry.sums()) for entry in entries}
    total = _digest(*(f"{name}={digest};".encode() for name, digest in sorted(digests.items())))
    own = np.frombuffer(bytes.fromhex(total), np.int32)
    gathered = np.array((yield AllGather(own))).reshape(-1, own.size)
    if (gathered == gathered[0]).all():
        return {}
    return differences((yield from shared_lines(digests)), "nothing")


def brought(entry: Entry, root: int) -> Synchronization[None]:
    """Replaces an entry by that of another rank, on all ranks."""
    own = entry.read()
    words = np.zeros(-(-own.size // 4), np.int32)
    words.view(np.uint8)[: own.size] = own
    received = np.ascontiguousarray((yield Broadcast(words, root)))
    entry.write(received.view(np.uint8)[: own.size])


def _kind(entry: Entry | None) -> str:
    return "nothing" if entry is None else entry.kind


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
