"""Gradients where the other ranks of a host can read them: they are summed within it and never sent.

The memory has no name and no file (memfd), so nothing of it is left behind, whatever becomes of the ranks: it
ends with the last process that has it mapped. Others find it by the process that made it, through /proc.
Where that cannot be (ranks in containers of their own, another system than Linux, no memory), gradients
travel in messages.

A rank reads what others have written behind a round of messages of a few words, in which each says that its
gradient is complete. Nobody writes to its own before another round, that of the sums, has ended: its messages
are sent when gradients have been read. So what is waited for, how long, and what becomes of it when a rank
ends is the same as with messages alone.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays import GradientParts, SummedParts
from horovod_sparse.collectives import AllGather, Synchronization, Words, shared_lines
from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.feedback import TwoLevelBucket
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.topology import Topology

Bytes = NDArray[np.uint8]

#: "1", or "0" to do without
MEMORY_VARIABLE = "HOROVOD_SPARSE_SHARED_MEMORY"

_log = logging.getLogger("horovod_sparse")

_NAME = "horovod_sparse"
#: regions begin at cache lines; in front of the first stand random bytes, by which others know the memory
_LINE, _TOKEN_BYTES = 64, 16
#: Linux 5.14: takes all pages at once, with an error where there is no memory, in place of a signal later
_MADV_POPULATE_WRITE = 23
#: types of gradients, as kernels get them
_KINDS = tuple(np.dtype(kind) for kind in (np.float32, np.float64, np.int16, np.uint16))
#: words that a rank tells of its gradient: its type, and its factor
_WORDS = 3


def may_share() -> bool:
    text = os.environ.get(MEMORY_VARIABLE, "").strip() or "1"
    if text not in ("0", "1"):
        raise ArgumentError(MEMORY_VARIABLE, text, "1, or 0 for messages within a host, too")
    return text == "1"


class Arena:
    """Memory of this process that other processes of the machine may read, in regions; zeros at first.

    It is given back when nobody holds a region or the arena any more. `lengths` are bytes of every region.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        ends = itertools.accumulate((-(-length // _LINE) * _LINE for length in lengths), initial=_LINE)
        self._starts, self._lengths = list(ends), list(lengths)
        self.size, self.token = self._starts.pop(), os.urandom(_TOKEN_BYTES)
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memory without a name (memfd_create)")
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.descriptor = os.memfd_create(_NAME, flags)
        os.ftruncate(self.descriptor, self.size)
        # who reads it can rely on its size: there is no signal for memory that is gone
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(self.descriptor, self.size)
        _populate(memory, self.descriptor, self.size)
        self._bytes: Bytes = np.frombuffer(memory, np.uint8)
        self._bytes[:_TOKEN_BYTES] = np.frombuffer(self.token, np.uint8)
        self._num_taken = 0

    def __del__(self) -> None:
        if (descriptor := getattr(self, "descriptor", None)) is not None:
            os.close(descriptor)

    def region(self, number: int, memory: Bytes | None = None) -> Bytes:
        """Bytes of a region, of another process's arena of the same lengths if its memory is given."""
        start = self._starts[number]
        return (self._bytes if memory is None else memory)[start : start + self._lengths[number]]

    def take(self) -> int:
        """The number of the next region that nobody has taken."""
        self._num_taken += 1
        return self._num_taken - 1

    @property
    def where(self) -> list[Any]:
        """How others find it, as `seen` takes it."""
        return [os.getpid(), self.descriptor, self.size, self.token.hex()]


def _populate(memory: mmap.mmap, descriptor: int, size: int) -> None:
    """Takes the memory now, in large pages where there are some."""
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _MADV_POPULATE_WRITE):
        try:
            if advice is not None:
                memory.madvise(advice)
        except OSError as error:
            if error.errno != errno.EINVAL:  # no memory; an old kernel does not know what is asked
                raise
            if advice == _MADV_POPULATE_WRITE:
                os.posix_fallocate(descriptor, 0, size)


def seen(pid: int, descriptor: int, size: int, token: str) -> Bytes:
    """The memory of another process's arena, to be read only; an OSError if it cannot be seen from here.

    In another container the process's number is another one's, or nobody's: the token at the beginning tells.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise OSError(errno.ENOENT, "another process has that number here", path)
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != size:
            raise OSError(errno.ENOENT, "another arena is there", path)
        memory: Bytes = np.frombuffer(mmap.mmap(opened, size, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(opened)
    if memory[:_TOKEN_BYTES].tobytes().hex() != token:
        raise OSError(errno.ENOENT, "another arena is there", path)
    return memory


class SharedSum:
    """A bucket's gradients on a host: this rank's lies in the region `own`, `lent` or copied there."""

    def __init__(self, whole: BucketInfo, regions: Sequence[Bytes], own: Bytes, lent: bool) -> None:
        self._whole, self._regions, self._own, self.lent = whole, list(regions), own, lent
        self.factor = 1.0

    def offer(self, gradient: GradientParts) -> Words:
        if not self.lent:
            gradient.put_into(self._own[: gradient.size * gradient.native.itemsize].view(gradient.native))
        elif not gradient.lies_at(self._own.ctypes.data):
            raise RuntimeError("a gradient has left the memory that it is lent in: this is a bug")
        words = np.empty(_WORDS, np.int32)
        words[0] = _KINDS.index(gradient.native)
        words[1:] = np.array([self.factor]).view(np.int32)
        return words

    def summed(self, told: Words, shard: tuple[int, int], num_elements: int) -> SummedParts:
        words = np.array(told, np.int32)
        if words.size != _WORDS * len(self._regions):
            raise MessageError(
                f"{words.size} words came from the {len(self._regions)} ranks of this host, {_WORDS} of each "
                "are expected: some rank has not offered its gradient, since it failed alone"
            )
        words = words.reshape(-1, _WORDS)
        if ((words[:, 0] < 0) | (words[:, 0] >= len(_KINDS))).any():
            raise MessageError(
                "a rank of this host offers a gradient of no known type: all must use one version"
            )
        factors = words[:, 1:].copy().view(np.float64).reshape(-1).tolist()
        arrays = []
        for region, kind in zip(self._regions, words[:, 0].tolist(), strict=True):
            dtype = _KINDS[kind]
            start, stop = (position * dtype.itemsize for position in shard)
            arrays.append(region[start:stop].view(dtype))
        parts = SummedParts(arrays, factors, num_elements, self._whole.value_dtype)
        if not self.lent:  # others write their next gradient when they have this step's sum
            parts.settle()
        return parts


_said: set[str] = set()


def agreed_memory(
    parts: Sequence[Any], rank: int, topology: Topology | None, why_not: str = ""
) -> Synchronization[str]:
    """Lets buckets be summed in memory that a host's ranks share, where all can; says in words how they are.

    All ranks together, behind every agreement about buckets: the memory that there was is let go. Two
    collectives, or none. `why_not` is why this rank cannot, if it knows already. Parts of two levels have
    `on_host`, whether the gradient is in the host's memory, and `lends`: the arena, and the number of the
    region, in which it lies.
    """
    if topology is None or topology.per_host == 1:
        return ""
    sharing = [
        part for part in parts if isinstance(getattr(part, "bucket", None), TwoLevelBucket) and part.on_host
    ]
    for part in sharing:
        part.bucket.shared = None
    held: list[tuple[Arena, int]] = []
    try:
        if not may_share():
            why_not = f"{MEMORY_VARIABLE}=0"
        if not why_not:
            held = _held(sharing)
    except (ArgumentError, OSError) as error:  # all ranks hear of it
        why_not = f"no memory: {error}"
    arenas = list(dict.fromkeys(arena for arena, _ in held))
    layout = [
        (part.bucket.whole.name, arenas.index(arena), number)
        for part, (arena, number) in zip(sharing, held, strict=not why_not)
    ]
    digest = hashlib.blake2b(repr(layout).encode(), digest_size=8).hexdigest()
    offers = yield from shared_lines([why_not, digest, [arena.where for arena in arenas]])
    reasons = {peer: reason for peer, (reason, *_) in enumerate(offers)}
    if not any(reasons.values()) and len({digest for _, digest, _ in offers}) > 1:
        reasons = dict.fromkeys(reasons, "ranks have laid out their buckets differently")
    seen_of: dict[int, list[Bytes]] = {}
    if not any(reasons.values()):
        failure = ""
        for peer in topology.group("host", rank):
            try:
                seen_of[peer] = [seen(*where) for where in offers[peer][2]]
            except OSError as error:
                failure = f"the memory of rank {peer} cannot be seen: {error}"
                break
        reasons = dict(enumerate((yield from shared_lines(failure))))
    if any(reasons.values()):
        return _said_once(rank, {peer: reason for peer, reason in reasons.items() if reason})
    for part, (arena, number) in zip(sharing, held, strict=True):
        memories = [seen_of[peer][arenas.index(arena)] for peer in topology.group("host", rank)]
        regions = [arena.region(number, memory) for memory in memories]
        own = arena.region(number)
        part.bucket.shared = SharedSum(part.bucket.whole, regions, own, part.lends is not None)
    return _said_once(rank, {}) if sharing else ""


def lends(parts: Sequence[Any]) -> bool:
    """Whether others read this rank's gradients where they lie."""
    return any(getattr(getattr(part, "bucket", None), "shared", None) is not None for part in parts)


def meeting() -> Synchronization[None]:
    """Ends when all ranks of the host have come to it."""
    yield AllGather(np.zeros(1, np.int32), level="host")


def why_not_shared(host: str) -> Synchronization[str]:
    """Why this rank would not share memory with others of its host; empty where it would. All ranks ask."""
    why_not, arenas = "", list[Arena]()
    try:
        if not may_share():
            why_not = f"{MEMORY_VARIABLE}=0"
        else:
            arenas.append(Arena([_LINE]))
    except (ArgumentError, OSError) as error:
        why_not = str(error)
    everyone = yield from shared_lines([host, why_not, [arena.where for arena in arenas]])
    for peer, (place, reason, wheres) in enumerate(everyone):
        try:
            if place == host and not why_not:
                why_not = reason and f"rank {peer}: {reason}"
                for where in wheres:
                    seen(*where)
        except OSError as error:
            why_not = f"the memory of rank {peer} cannot be seen: {error}"
    yield from shared_lines(None)  # arenas stay until all have looked
    return why_not


def _held(sharing: Sequence[Any]) -> list[tuple[Arena, int]]:
    """Where the gradients of parts lie, or are to be copied to."""
    wholes = [part.bucket.whole for part in sharing if part.lends is None]
    copies = Arena([one.num_elements * one.value_dtype.itemsize for one in wholes]) if wholes else None
    held = []
    for part in sharing:
        if part.lends is not None:
            held.append(part.lends)
        elif copies is not None:
            held.append((copies, copies.take()))
    return held


def _said_once(rank: int, reasons: dict[int, str]) -> str:
    """What has been agreed upon, in words; to the log, once and on one rank."""
    words = "gradients are summed within a host in memory that its ranks share"
    if reasons:
        why = next(iter(reasons.values()))
        ranks = sorted(peer for peer, reason in reasons.items() if reason == why)
        words = f"gradients are summed within a host by messages (ranks {ranks}: {why})"
    if rank == 0 and words not in _said:
        _said.add(words)
        asked = not reasons or all(MEMORY_VARIABLE in reason for reason in reasons.values())
        _log.log(logging.INFO if asked else logging.WARNING, "%s", words)
    return words
