"""Two levels: gradients are summed densely within a host, and sparsified between hosts.

With L ranks on each of N hosts a step of a bucket of n elements has three parts::

    host     reduce-scatter       rank l of a host gets its host's sum of shard l: n / L elements
    across   the sparsifier's     shard l is an ordinary bucket of N ranks: number l of each host
    host     all-gather           the sums of all shards, k indices and values each

So no sparsifier knows of levels, the fold, the selection and the residual are n / L long, and what leaves a
host is what N ranks would send, not N * L. A host counts as one rank: if one of its ranks' gradients is not
finite, neither is the host's sum, and the whole host's gradient is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from horovod_sparse import errors
from horovod_sparse.arrays import Accumulator, FoldReport, GradientParts
from horovod_sparse.collectives import AllGather, ReduceScatter, Synchronization, Words, at_level, rank_part
from horovod_sparse.errors import HorovodSparseError, MessageError
from horovod_sparse.feedback.bucket import Bucket, Members
from horovod_sparse.feedback.recipe import Recipe
from horovod_sparse.sparsifiers import BucketInfo, SparseSum, WholeSum
from horovod_sparse.telemetry import BucketStep
from horovod_sparse.topology import Topology
from horovod_sparse.wire import Notes, WireFormat, pack, unpack_sum

#: within a host bytes are cheap: exact values, int32 indices
_INSIDE = WireFormat()
#: errors that the host's other ranks raise with the same type; others become a HorovodSparseError
_MADE_OF_TEXT = errors.StateMismatchError, MessageError, errors.CollectiveMismatchError


def summable(gradient: Any, whole: BucketInfo) -> np.ndarray:
    """Returns a gradient as one host array that an allreduce can sum: half types as float32."""
    parts = gradient if isinstance(gradient, GradientParts) else GradientParts([gradient])
    return parts.joined(whole.value_dtype)


def padded(shard: np.ndarray, num_elements: int) -> GradientParts:
    """Returns a shard with zeros appended up to `num_elements`, the longest shard's, as a bucket folds it."""
    short = num_elements - shard.size
    return GradientParts([shard, np.zeros(short, shard.dtype)] if short else [shard])


@dataclass(frozen=True, eq=False)
class ShardMessage:
    """The result of one shard, which its rank sends to the ranks of its host: facts as JSON, and the sum."""

    step: int
    #: by host: selected elements, index of the first NaN or Inf, norm of the residual
    counts: list[int]
    marks: list[int | None]
    norms: list[float] | None
    #: index of the sum's first element that overflows the gradient's dtype
    overflow: int | None
    #: class name and text of the error raised in place of a sum
    failure: tuple[str, str] | None
    #: True if the sum has all elements, without indices
    whole: bool
    sum: Words

    def packed(self) -> Words:
        """Returns the message as words: the lengths of JSON and sum, then both."""
        *head, words = vars(self).values()
        line = json.dumps(head).encode()
        text = np.frombuffer(line + b" " * (-len(line) % 4), np.int32)
        return np.concatenate([np.array([text.size, words.size], np.int32), text, words])

    @classmethod
    def unpacked(cls, words: Words, count: int) -> list[ShardMessage]:
        """Reads `count` messages, one after another; raises the error that one of them reports."""
        messages: list[ShardMessage] = []
        for _ in range(count):
            if words.size < 2 or words.size < (stop := 2 + int(words[0]) + int(words[1])):
                raise MessageError("a message lacks a shard's sum: install one version on all ranks")
            head, own = words[2 : 2 + int(words[0])], words[2 + int(words[0]) : stop]
            messages.append(cls(*[*json.loads(head.tobytes()), own]))
            words = words[stop:]
            if (failure := messages[-1].failure) is not None:
                kind = getattr(errors, failure[0], HorovodSparseError)
                raise (kind if kind in _MADE_OF_TEXT else HorovodSparseError)(failure[1])
        return messages


class TwoLevelBucket(Bucket):
    """A bucket whose gradients are summed within each host first; a rank then sparsifies one slice (shard).

    It is the bucket of the shard (`info`, `accumulator`, `state`), and synchronizes the whole. Shards are as
    long as the longest: a shorter one ends in an element that is always 0.
    """

    def __init__(
        self,
        whole: BucketInfo,
        recipe: Recipe,
        accumulator: Accumulator,
        members: Members | None,
        topology: Topology,
        *,
        summable: Callable[[Any, BucketInfo], Any] = summable,
        pad: Callable[[Any, int], Any] = padded,
    ) -> None:
        recipe = replace(recipe, feedback=recipe.feedback.for_shards(topology.per_host))
        self._whole, self.topology = whole, topology
        super().__init__(shard_of(whole, topology), recipe, accumulator, members)
        self._summable, self._pad = summable, pad
        self.host, self.local = topology.position(whole.rank)

    @property
    def num_summed(self) -> int:
        return self.topology.per_host

    @property
    def whole(self) -> BucketInfo:
        return self._whole

    @property
    def shard(self) -> tuple[int, int]:
        return rank_part(self.whole.num_elements, self.local, self.topology.per_host)

    def spread_shard(self, values: np.ndarray) -> np.ndarray:
        start, stop = self.shard
        whole = np.zeros(self.whole.num_elements, values.dtype)
        whole[start:stop] = values[: stop - start]
        return whole

    def load(self, arrays: Sequence[np.ndarray]) -> None:
        self._assign_padded([values[slice(*self.shard)] for values in arrays])

    def load_host_sum(self, arrays: Sequence[np.ndarray]) -> Synchronization[None]:
        """Loads the sum over this host's ranks of arrays [n]; all ranks of the host call it together."""
        shards = []
        for values in arrays:
            shard = yield ReduceScatter(np.ascontiguousarray(values), level="host")
            shards.append(shard)
        self._assign_padded(shards)

    def _assign_padded(self, shards: Sequence[np.ndarray]) -> None:
        short = self.info.num_elements - shards[0].size  # up to the length of the longest
        self.accumulator.assign_arrays([np.append(one, np.zeros(short, one.dtype)) for one in shards])

    def reduce_within_host(self, gradient: Any) -> Synchronization[Any]:
        shard = yield ReduceScatter(self._summable(gradient, self.whole), level="host")
        return self._pad(shard, self.info.num_elements)

    def _check_steps(self, steps: np.ndarray, ranks: Sequence[int] | None = None) -> None:
        """Raises if ranks are not at the same step; by default those of this rank's column."""
        super()._check_steps(steps, self.topology.columns[self.local] if ranks is None else ranks)

    def raise_if_failed(self, marks: Mapping[int, int], overflow: int | None) -> None:
        try:
            super().raise_if_failed(marks, overflow)
        except errors.NonFiniteGradientError as error:
            error.hosts = self.topology.hosts
            raise

    def synchronize(self, report: BucketStep, scale: float | None = None) -> Synchronization[SparseSum]:
        """Sums this rank's shard over hosts; returns the whole bucket's sum; raises errors on all ranks."""
        failure: HorovodSparseError | None = None
        try:
            sum_, overflow = yield from at_level(self._sum_over_ranks(report, scale), "across")
        except HorovodSparseError as error:  # raised in this column alone: others need this rank's message
            failure, overflow = error, None
            nothing = np.empty(0, np.int32), np.empty(0, self.whole.value_dtype)
            sum_ = SparseSum(*nothing, np.zeros(self.topology.num_hosts, np.int64))
        message = AllGather(self._message(sum_, overflow, failure), level="host")
        gathered = yield message
        try:
            (whole, marks, overflow), facts = self._join_shards(gathered), sum_.facts
        except HorovodSparseError as error:
            self._undo_step()
            raise failure or error from None
        sum_, sum_.facts = whole, facts
        if marks or overflow is not None:
            self._undo_step()
        own = list(self.topology.hosts[self.host])
        report.bucket, report.num_elements = self.whole.name, self.whole.num_elements
        report.num_target = min(report.num_target * self.topology.per_host, report.num_elements)
        report.num_selected = int(sum_.counts[own].sum())
        if (norms := sum_.notes.norms) is not None:
            report.global_error = float(np.add.reduce(norms)) / len(norms)
        num_bytes = self.whole.num_elements * self.whole.value_dtype.itemsize
        report.bytes_inside = num_bytes + message.buffer.nbytes
        report.bytes_by_round = [num_bytes, *report.bytes_by_round, message.buffer.nbytes]
        self.raise_if_failed(marks, overflow)
        return sum_

    def _message(self, sum_: SparseSum, overflow: int | None, failure: HorovodSparseError | None) -> Words:
        """Returns this shard's sum, overflow or error, as words for the other ranks of the host."""
        (start, stop), notes = self.shard, sum_.notes
        cancelled = overflow is not None or bool(notes.first_nonfinite)
        whole = sum_.whole and not cancelled
        if whole:
            sent = sum_.values[: stop - start].view(np.int32)
        else:  # without the element that fills a shard up: it is 0
            kept = np.flatnonzero(sum_.indices < (0 if cancelled else stop - start))
            chosen, n = (sum_.indices[kept] + np.int32(start), sum_.values[kept]), self.whole.num_elements
            sent = pack(*chosen, FoldReport(), _INSIDE, n)
        return ShardMessage(
            step=self.accumulator.report.step,
            counts=sum_.counts.tolist(),
            marks=list(map(notes.first_nonfinite.get, range(self.topology.num_hosts))),
            norms=None if notes.norms is None else notes.norms.tolist(),
            overflow=overflow,
            failure=None if failure is None else (type(failure).__name__, str(failure)),
            whole=whole,
            sum=sent,
        ).packed()

    def _join_shards(self, gathered: Words) -> tuple[SparseSum, dict[int, int], int | None]:
        """Decodes the host's messages: returns whole sum, {rank: position of NaN or Inf}, and overflow."""
        n, dtype = self.whole.num_elements, self.whole.value_dtype
        messages = ShardMessage.unpacked(np.asarray(gathered), self.topology.per_host)
        self._check_steps(np.array([one.step for one in messages]), self.topology.hosts[self.host])
        counts, norms = np.zeros(self.whole.size, np.int64), np.zeros(self.whole.size)
        marks: dict[int, int] = {}
        overflows = []
        for local, message in enumerate(messages):
            start, stop = rank_part(n, local, self.topology.per_host)
            column = list(self.topology.columns[local])
            counts[column] = message.counts
            if message.overflow is not None:
                overflows.append(start + message.overflow)
            for host, ranks in enumerate(map(list, self.topology.hosts)):
                norms[ranks] += 0.0 if message.norms is None else message.norms[host] ** 2
                if (position := message.marks[host]) == self.info.num_elements:  # this rank itself cancels
                    marks[column[host]] = n
                elif position is not None:
                    found = min(start + position, stop - 1)
                    for rank in ranks:  # but for one that cancels the step itself
                        marks[rank] = n if marks.get(rank) == n else min(found, marks.get(rank, n))
        notes = Notes(marks, None if messages[0].norms is None else np.sqrt(norms))
        overflow = min(overflows, default=None)
        selections = [one.sum for one in messages if not one.whole]
        if not selections:
            values = np.concatenate([one.sum for one in messages]).view(dtype)
            if values.size != n:
                raise MessageError(f"ranks sent {values.size} values for {n} elements: give all one model")
            return WholeSum(values, counts, notes), marks, overflow
        whole = unpack_sum(np.concatenate(selections), len(selections), _INSIDE, n, dtype)
        return SparseSum(whole.indices, whole.values, counts, notes), marks, overflow


def shard_of(whole: BucketInfo, topology: Topology) -> BucketInfo:
    """Returns info about this rank's shard: its ranks are one of each host, its length is the longest's.

    Example:
        >>> shard_of(BucketInfo("w", 9, rank=3, size=4), Topology.regular(2, 2))
        BucketInfo(name='w/1', num_elements=5, rank=1, size=2, dtype='float32', number=None)
    """
    host, local = topology.position(whole.rank)
    _, longest = rank_part(whole.num_elements, 0, topology.per_host)
    return BucketInfo(f"{whole.name}/{local}", longest, host, topology.num_hosts, whole.dtype, whole.number)
