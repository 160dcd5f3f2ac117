"""Whether parameters and optimizer state are still equal on all ranks: compared every so many steps.

What breaks that (a loop that changes parameters on one rank, a state that was loaded on one, memory that
flips a bit) breaks it without a word. So every N steps each rank digests what has to be equal at the speed of
memory, and all compare one number in one message; where it differs, they look for what does. What differs
from rank to rank by design (gradients, residuals, statistics of batches) nobody looks at.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.collectives import AllGather, Synchronization, shared_lines
from horovod_sparse.errors import DriftError
from horovod_sparse.training.agreement import differences
from horovod_sparse.training.collective_errors import some_of
from horovod_sparse.training.settings import Settings

#: 64-bit words of a row; rows are added up. Sums this long stay in the first cache
COLUMNS = 512
_WORD_BYTES = 8


class Entry(Protocol):
    """Numbers that have to be equal on all ranks; `kind` is their dtype and shape, in words."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    def sums(self) -> NDArray[np.uint64]:
        """Returns the `word_sums` of its bytes, on whatever device they are."""

    def read(self) -> NDArray[np.uint8]:
        """Returns its bytes, in C order: a view, or a copy."""


@dataclass(frozen=True)
class HostEntry:
    """Implements `Entry` for an array in the host's memory."""

    name: str
    array: np.ndarray

    @property
    def kind(self) -> str:
        return f"{self.array.dtype.name}{list(self.array.shape)}"

    def sums(self) -> NDArray[np.uint64]:
        return word_sums(self.read())

    def read(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.array).reshape(-1).view(np.uint8)


def word_sums(values: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Returns sums of every 512th of 64-bit words, modulo 2**64: one pass over the memory.

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
    """Says when a training compares, and raises `DriftError` on all ranks where they differ."""

    def __init__(self, settings: Settings) -> None:
        self.every = settings.check_every or 0
        #: of the training, after which all compare; Inf for never
        self.next_step = math.inf
        self.restart(0)

    def restart(self, step: int) -> None:
        """Has ranks compare after the next step, since they begin anew together: beginnings may differ."""
        self.next_step = step + 1 if self.every else math.inf

    def postpone(self, step: int) -> None:
        """Sets the next comparison by the step alone, which is equal on all ranks."""
        self.next_step = (step // self.every + 1) * self.every if self.every else math.inf

    def run(self, step: int, entries: Sequence[Entry]) -> Synchronization[None]:
        self.postpone(step)
        if differing := (yield from differing_entries(entries)):
            more = f"; {len(differing)} differ: {some_of(list(differing))}" if len(differing) > 1 else ""
            raise DriftError(f"after step {step} {next(iter(differing.values()))}{more}")


def differing_entries(entries: Sequence[Entry]) -> Synchronization[dict[str, str]]:
    """Returns what differs, in words, by name: one message, and one more where something does."""
    digests = {entry.name: _digest(entry.kind.encode(), entry.sums()) for entry in entries}
    total = _digest(*(f"{name}={digest};".encode() for name, digest in sorted(digests.items())))
    own = np.frombuffer(bytes.fromhex(total), np.int32)
    gathered = np.array((yield AllGather(own))).reshape(-1, own.size)
    if (gathered == gathered[0]).all():
        return {}
    return differences((yield from shared_lines(digests)), "nothing")


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
