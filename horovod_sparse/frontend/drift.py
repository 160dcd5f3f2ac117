"""Whether parameters and optimizer state are still equal on all ranks: compared every so many steps.

Replicas stay equal because all ranks apply the same sums. What breaks that (a loop that changes parameters
on one rank, a state that was loaded on one, memory that flips a bit) breaks it without a word: every rank
goes on with gradients of another model. So every N steps each rank digests what has to be equal, at the speed
of memory, and all compare one number in one message; where it differs, they look for what does.

Gradients, residuals, statistics of batches and the like differ from rank to rank by design: nobody looks.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.checks import whole_number
from horovod_sparse.collectives import AllGather, Broadcast, Synchronization
from horovod_sparse.errors import ArgumentError, DriftError
from horovod_sparse.frontend.agreement import ranks_apart, shared_lines
from horovod_sparse.frontend.collective_errors import some_of
from horovod_sparse.telemetry import Telemetry

_log = logging.getLogger("horovod_sparse")

#: defaults, for those too who have no argument to give (Horovod's own optimizer with our compressor)
EVERY_VARIABLE, POLICY_VARIABLE = "HOROVOD_SPARSE_CHECK_EVERY", "HOROVOD_SPARSE_ON_DRIFT"
_EVERY = 1000
#: what `on_drift` may be
POLICIES = RAISE, WARN, RESYNC = "raise", "warn", "resync"

#: 64-bit words of a row; rows are added up. Sums this long stay in the first cache
COLUMNS = 512
_WORD_BYTES = 8


class Entry(Protocol):
    """Numbers that have to be equal on all ranks.

    Attributes:
        name: the same on all ranks.
        kind: dtype and shape, in words.
    """

    @property
    def name(self) -> str:
        """See the attributes."""

    @property
    def kind(self) -> str:
        """See the attributes."""

    def sums(self) -> NDArray[np.uint64]:
        """What `word_sums` gives of its bytes, on whatever device they are."""

    def read(self) -> NDArray[np.uint8]:
        """Its bytes, in C order: a view, or a copy."""

    def write(self, values: NDArray[np.uint8]) -> None:
        """Replaces them."""


@dataclass(frozen=True)
class HostEntry:
    """An `Entry` of an array in the host's memory.

    Args:
        name: the same on all ranks.
        array: of numbers, in any order.
        assign: takes an array of the same dtype and shape.
    """

    name: str
    array: np.ndarray
    assign: Callable[[np.ndarray], Any]

    @property
    def kind(self) -> str:
        """See `Entry`."""
        return f"{self.array.dtype.name}{list(self.array.shape)}"

    def sums(self) -> NDArray[np.uint64]:
        """See `Entry`."""
        return word_sums(self.read())

    def read(self) -> NDArray[np.uint8]:
        """See `Entry`."""
        return np.ascontiguousarray(self.array).reshape(-1).view(np.uint8)

    def write(self, values: NDArray[np.uint8]) -> None:
        """See `Entry`."""
        self.assign(values.view(self.array.dtype).reshape(self.array.shape))


def word_sums(values: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Sums of every 512th of 64-bit words, modulo 2**64: one pass over the memory.

    One changed bit always shows; several do, unless they cancel out within 512 words' distance to the bit.

    Args:
        values: bytes, contiguous.

    Returns:
        shape (512,); zeros behind the last byte count.

    Example:
        >>> sums = word_sums(np.ones(2 * 8 * 512 + 1, np.uint8))
        >>> hex(sums[0]), hex(sums[1])
        ('0x202020202020203', '0x202020202020202')
    """
    row = COLUMNS * _WORD_BYTES
    whole = values.size // row * row
    sums = np.add.reduce(values[:whole].view(np.uint64).reshape(-1, COLUMNS), axis=0, dtype=np.uint64)
    if whole < values.size:
        rest = np.zeros(row, np.uint8)
        rest[: values.size - whole] = values[whole:]
        sums = sums + rest.view(np.uint64)
    return np.asarray(sums, np.uint64)


def check_drift_arguments(check_every: int | None, on_drift: str | None) -> tuple[int, str]:
    """What is asked for, by arguments or by the environment.

    Args:
        check_every: steps, 0 for never, or None.
        on_drift: a policy, or None.

    Raises:
        ArgumentError: naming the argument, or the variable.

    Example:
        >>> check_drift_arguments(None, "warn")
        (1000, 'warn')
    """
    name, every = "check_every", check_every
    if every is None:
        name, text = EVERY_VARIABLE, os.environ.get(EVERY_VARIABLE, "").strip()
        every = whole_number(text) if text else _EVERY
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ArgumentError(name, os.environ.get(name, check_every), "a number of steps, or 0 for never")
    policy = on_drift if on_drift is not None else os.environ.get(POLICY_VARIABLE, "").strip() or RAISE
    if policy not in POLICIES:
        name = "on_drift" if on_drift is not None else POLICY_VARIABLE
        raise ArgumentError(name, policy, "'raise', 'warn' or 'resync'")
    return every, policy


class DriftCheck:
    """When one training compares, and what it does about what it finds.

    * "raise": `DriftError` on every rank, which names the first entry that differs, and the ranks.
    * "warn": the same in the log, once until something else differs.
    * "resync": what differs becomes what rank 0 has, on all ranks; counted in the telemetry, and in the log.

    Args:
        check_every: see `check_drift_arguments`.
        on_drift: see there.
        telemetry: of the training.

    Attributes:
        next_step: of the training, after which all compare; Inf for never.
    """

    def __init__(self, check_every: int | None, on_drift: str | None, telemetry: Telemetry) -> None:
        self.every, self.policy = check_drift_arguments(check_every, on_drift)
        self._telemetry = telemetry
        self._known: frozenset[str] = frozenset()
        self.next_step = math.inf
        self.restart(0)

    def restart(self, step: int) -> None:
        """All ranks stand at this step of the training: by it alone they know when to compare next."""
        self.next_step = (step // self.every + 1) * self.every if self.every else math.inf

    def describe(self) -> dict[str, object]:
        """What has to be equal on all ranks, in words, by argument."""
        return {"check_every": self.every, "on_drift": self.policy}

    def run(self, step: int, rank: int, entries: Sequence[Entry]) -> Synchronization[None]:
        """Compares, between two steps; all ranks together.

        Args:
            step: of the training.
            rank: of this process.
            entries: in the same order on all ranks, or not: names tell.

        Raises:
            DriftError: on every rank alike.
        """
        self.restart(step)
        differing = yield from differing_entries(entries)
        if not differing:
            self._known = frozenset()
            return
        self._telemetry.num_drifts += 1
        more = f"; {len(differing)} differ: {some_of(list(differing))}" if len(differing) > 1 else ""
        what = f"after step {step} {next(iter(differing.values()))}{more}"
        if self.policy == RAISE:
            raise DriftError(what)
        if self.policy == WARN:
            if not differing.keys() <= self._known:
                _log.warning("%s", DriftError(what))
            self._known = frozenset(differing)
            return
        by_name = {entry.name: entry for entry in entries}
        shared = yield from shared_lines({name: _kind(by_name.get(name)) for name in differing})
        if unlike := [name for name in differing if len({kinds[name] for kinds in shared}) > 1]:
            raise DriftError(f"{what}; {unlike[0]} has not the same type and shape on all ranks: it stays")
        for name in differing:
            yield from _from_first(by_name[name], rank)
        if rank == 0:
            _log.warning("%s; all ranks have what rank 0 has now", what)


def differing_entries(entries: Sequence[Entry]) -> Synchronization[dict[str, str]]:
    """What differs, in words, by name: one message, and one more where something does.

    Args:
        entries: see `DriftCheck.run`.

    Returns:
        The same on all ranks, in the order of the first rank's entries.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> ranks = [HostEntry("fc.bias", np.array([1.0, rank]), None) for rank in (0, 0, 1)]
        >>> found = run_lockstep([differing_entries([entry]) for entry in ranks])[0]
        >>> found["fc.bias"].split(" have")[0], "ranks [2]" in found["fc.bias"]
        ('fc.bias differs: ranks [0, 1]', True)
    """
    digests = {entry.name: _digest(entry.kind.encode(), entry.sums()) for entry in entries}
    total = _digest(*(f"{name}={digest};".encode() for name, digest in sorted(digests.items())))
    own = np.frombuffer(bytes.fromhex(total), np.int32)
    gathered = np.array((yield AllGather(own))).reshape(-1, own.size)
    if (gathered == gathered[0]).all():
        return {}
    everyone = yield from shared_lines(digests)
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    values = {name: [theirs.get(name, "nothing") for theirs in everyone] for name in names}
    return {
        name: f"{name} differs: {ranks_apart('have {}', each)}"
        for name, each in values.items()
        if len(set(each)) > 1
    }


def _from_first(entry: Entry, rank: int) -> Synchronization[None]:
    """Replaces an entry by that of rank 0."""
    own = entry.read()
    words = np.zeros(-(-own.size // 4), np.int32)
    words.view(np.uint8)[: own.size] = own
    received = np.ascontiguousarray((yield Broadcast(words, 0)))
    if rank != 0:
        entry.write(received.view(np.uint8)[: own.size])


def _kind(entry: Entry | None) -> str:
    return "nothing" if entry is None else entry.kind


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
