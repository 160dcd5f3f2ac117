"""Two levels: gradients are summed densely within a host, and sparsified between hosts.

With L ranks on each of N hosts a step of a bucket of n elements has three parts::

    host     reduce-scatter       rank l of a host gets its host's sum of shard l: n / L elements
    across   the sparsifier's     shard l is an ordinary bucket of N ranks: those with place l on their hosts
    host     all-gather           the sums of all shards, k indices and values each

So no sparsifier knows of levels, the fold, the selection and the residual are n / L long, and what leaves a
host is what N ranks would send, not N * L. A host is what a rank is otherwise: where the gradient of one of
its ranks is not finite, so is its sum, and the whole host's gradient is dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import errors
from horovod_sparse.arrays import Accumulator, FoldReport, GradientParts
from horovod_sparse.collectives import AllGather, ReduceScatter, Synchronization, Words, at_level, part
from horovod_sparse.errors import HorovodSparseError, MessageError
from horovod_sparse.feedback.bucket import Bucket, Member
from horovod_sparse.feedback.recipe import Recipe
from horovod_sparse.sparsifiers import BucketInfo, SparseSum, WholeSum
from horovod_sparse.topology import Topology
from horovod_sparse.wire import Notes, WireFormat, pack, unpack_sum

#: within a host bytes are cheap, and every index is written by who knows its shard
_INSIDE = WireFormat()


def summable(gradient: Any, whole: BucketInfo) -> np.ndarray:
    """A gradient on the host as one array that can be summed: half types in float32."""
    kept = gradient if isinstance(gradient, GradientParts) else GradientParts([gradient])
    summed = kept.joined(whole.value_dtype)
    if kept is gradient:
        return summed
    summed = summed.copy()
    gradient[...] = 0  # as after a fold
    return summed


def foldable(shard: np.ndarray, num_elements: int) -> GradientParts:
    """A host's sum of a shard, as an accumulator of so many elements folds it, and leaves it as it is."""
    short = num_elements - shard.size
    return GradientParts([shard, np.zeros(short, shard.dtype)] if short else [shard])


@dataclass(frozen=True, eq=False)
class ShardMessage:
    """What a rank's column has found of its shard, for the ranks of its host: in one row of words.

    By host: `counts`, `marks` and `norms`; then w, `step` and 1 + `overflow` (or 0); then w words of an
    error's text, and the sum: a selection, which begins with its length, or minus the number of words that
    follow, counting itself, and the values of all elements.
    """

    #: elements selected
    counts: NDArray[np.integer]
    #: 1 + the first element that is not finite, or 0
    marks: NDArray[np.int32]
    #: of the residuals, float32 on the way
    norms: NDArray[np.floating]
    #: synchronizations that this rank has done
    step: int
    #: the first element of the sum that its type cannot hold
    overflow: int | None = None
    #: of the column, in place of its sum
    failure: HorovodSparseError | None = None
    selection: Words = field(default_factory=lambda: np.empty(0, np.int32))
    values: Words | None = None

    def packed(self) -> Words:
        """As it travels."""
        text = np.empty(0, np.int32)
        if self.failure is not None:
            line = json.dumps([type(self.failure).__name__, str(self.failure)]).encode()
            text = np.frombuffer(line + b" " * (-len(line) % 4), np.int32)
        norms = np.asarray(self.norms, np.float32).view(np.int32)
        overflow = 0 if self.overflow is None else 1 + self.overflow
        numbers = [text.size, self.step, overflow]
        body = [self.selection] if self.values is None else [[-1 - self.values.size], self.values]
        parts = [self.counts, self.marks, norms, numbers, text, *body]
        return np.concatenate([np.asarray(one, np.int32) for one in parts])

    @classmethod
    def unpacked(cls, words: Words, count: int, hosts: int) -> list[ShardMessage]:
        """So many of them, which came one behind the other. An error that one tells is raised."""
        messages: list[ShardMessage] = []
        start = 0
        for _ in range(count):
            end = start + 3 * hosts + 3
            if end < words.size and (length := int(words[end - 3])) > 0:
                raise _failure_of(words[end : end + length])
            if end >= words.size or words[end] == 0:
                raise MessageError(f"{words.size} words arrived, which are not the sums of all shards")
            counts, marks, norms = words[start : end - 3].reshape(3, hosts)
            overflow = int(words[end - 1])
            start = end + abs(int(words[end]))
            whole = bool(words[end] < 0)
            message = cls(
                counts=counts,
                marks=marks,
                norms=norms.view(np.float32).astype(np.float64),
                step=int(words[end - 2]),
                overflow=overflow - 1 if overflow else None,
                selection=words[end:start],
                values=words[end + 1 : start] if whole else None,
            )
            messages.append(message)
        return messages


def _failure_of(words: Words) -> HorovodSparseError:
    """The error that another column has told; of its kind, where that is made of a text."""
    name, text = json.loads(words.tobytes())
    kind = getattr(errors, name, HorovodSparseError)
    made_of_text = kind in (errors.StateMismatchError, MessageError, errors.CollectiveMismatchError)
    return (kind if made_of_text else HorovodSparseError)(text)


class TwoLevelBucket(Bucket):
    """A rank's shard of a bucket whose gradients are summed within hosts first.

    It is the bucket of the shard (`info`, `accumulator`, `state`), and synchronizes the whole. Shards are as
    long as the longest: a shorter one ends in an element that is always 0.
    """

    def __init__(
        self,
        whole: BucketInfo,
        recipe: Recipe,
        accumulator: Accumulator,
        members: Sequence[Member],
        topology: Topology,
        *,
        summable: Callable[[Any, BucketInfo], Any] = summable,
        foldable: Callable[[Any, int], Any] = foldable,
    ) -> None:
        if for_shards := getattr(recipe.feedback, "for_shards", None):
            recipe = replace(recipe, feedback=for_shards(topology.per_host))
        members = tuple(members) or (Member(whole.name, 0, whole.num_elements),)
        self._whole, self.topology = whole, topology
        super().__init__(shard_of(whole, topology), recipe, accumulator, members)
        self._summable, self._foldable = summable, foldable
        self.host, self.local = topology.place(whole.rank)

    @property
    def summed(self) -> int:
        return self.topology.per_host

    @property
    def whole(self) -> BucketInfo:
        """The facts of all of it, and of all ranks."""
        return self._whole

    @property
    def shard(self) -> tuple[int, int]:
        """See `Bucket.shard`."""
        return part(self.whole.num_elements, self.local, self.topology.per_host)

    def spread(self, held: np.ndarray) -> np.ndarray:
        """See `Bucket.spread`."""
        start, stop = self.shard
        values = np.zeros(self.whole.num_elements, held.dtype)
        values[start:stop] = held[: stop - start]
        return values

    def load(self, held: Sequence[np.ndarray]) -> None:
        """See `Bucket.load`."""
        self._load([values[slice(*self.shard)] for values in held])

    def gathered(self, held: Sequence[np.ndarray]) -> Synchronization[None]:
        """See `Bucket.gathered`; all ranks of the host do so together."""
        shards = []
        for values in held:
            shard = yield ReduceScatter(np.ascontiguousarray(values), level="host")
            shards.append(shard)
        self._load(shards)

    def _load(self, shards: Sequence[np.ndarray]) -> None:
        short = self.info.num_elements - shards[0].size  # up to the length of the longest
        self.accumulator.assign_held([np.append(one, np.zeros(short, one.dtype)) for one in shards])

    def step(
        self,
        gradient: Any,
        learning_rate: float | None = None,
        *,
        refused: bool = False,
        scale: float | None = None,
    ) -> Synchronization[SparseSum]:
        """See `Bucket.step`; `gradient` is that of the whole, and the sum, too."""
        summed = self._summable(gradient, self.whole)
        shard = self._foldable((yield ReduceScatter(summed, level="host")), self.info.num_elements)
        of_shard = self._synchronized(shard, learning_rate, refused, scale)
        num_bytes = self.whole.num_elements * self.whole.value_dtype.itemsize
        return (yield from self._of_whole(of_shard, {"ReduceScatter": num_bytes}))

    def again(self, *, scale: float | None = None) -> Synchronization[SparseSum]:
        """See `Bucket.again`; a host whose sum was not finite is left out as a whole."""
        return (yield from self._of_whole(self._synchronized_again(scale), {}))

    def _check_steps(self, steps: np.ndarray, ranks: Sequence[int] | None = None) -> None:
        """See `Bucket._check_steps`; of this rank's column, if nothing else is said."""
        super()._check_steps(steps, self.topology.columns[self.local] if ranks is None else ranks)

    def _check(self, marks: Mapping[int, int], overflow: int | None) -> None:
        try:
            super()._check(marks, overflow)
        except errors.NonFiniteGradientError as error:
            error.hosts = self.topology.hosts
            raise

    def _of_whole(
        self, of_shard: Synchronization[tuple[SparseSum, int | None]], before: Mapping[str, int]
    ) -> Synchronization[SparseSum]:
        """The sum of the whole, from the synchronization of this rank's shard; or an error of all ranks."""
        failure: HorovodSparseError | None = None
        try:
            sum_, overflow = yield from at_level(of_shard, "across")
        except HorovodSparseError as error:  # of all ranks of this column; the others wait for what is next
            failure, overflow = error, None
            nothing = np.empty(0, np.int32), np.empty(0, self.whole.value_dtype)
            sum_ = SparseSum(*nothing, np.zeros(self.topology.num_hosts, np.int64))
        report = self.last
        message = AllGather(self._message(sum_, overflow, failure), level="host")
        gathered = yield message
        try:
            sum_, marks, overflow = self._joined(gathered, sum_)
        except HorovodSparseError as error:
            self.abandon()
            raise failure or error from None
        if marks or overflow is not None:
            self.abandon()
        own = list(self.topology.hosts[self.host])
        report.bucket, report.num_elements = self.whole.name, self.whole.num_elements
        report.num_target = min(report.num_target * self.topology.per_host, report.num_elements)
        report.num_selected = int(sum_.counts[own].sum())
        report.num_received = sum_.values.size
        if (norms := sum_.notes.norms) is not None:
            report.global_error = float(np.add.reduce(norms)) / len(norms)
        report.bytes_inside = sum(before.values()) + message.buffer.nbytes
        report.bytes_by_round = [*before.values(), *report.bytes_by_round, message.buffer.nbytes]
        report.kinds_by_round = [*before, *report.kinds_by_round, "AllGather"]
        report.residual_norm = math.sqrt(self.accumulator.square_norm)
        self._check(marks, overflow)
        return sum_

    def _message(self, sum_: SparseSum, overflow: int | None, failure: HorovodSparseError | None) -> Words:
        """What this rank's column has found, for the ranks of its host."""
        start, stop = self.shard
        marks = np.zeros(self.topology.num_hosts, np.int32)
        for host, position in sum_.notes.first_nonfinite.items():
            marks[host] = 1 + position
        norms = np.full(marks.size, np.nan) if sum_.notes.norms is None else sum_.notes.norms
        given_up = overflow is not None or bool(sum_.notes.first_nonfinite)
        message = ShardMessage(
            counts=sum_.counts,
            marks=marks,
            norms=norms,
            step=self.accumulator.report.step,
            overflow=overflow,
            failure=failure,
        )
        if sum_.whole and not given_up:
            return replace(message, values=sum_.values[: stop - start].view(np.int32)).packed()
        nothing = np.empty(0, np.int32), sum_.values[:0]
        indices, values = nothing if given_up else (sum_.indices, sum_.values)
        if (short := indices >= stop - start).any():  # the element that fills a shard up: it is 0
            indices, values = indices[~short], values[~short]
        n = self.whole.num_elements
        sent = pack(indices + np.int32(start), values, FoldReport(), format=_INSIDE, num_elements=n)
        return replace(message, selection=sent).packed()

    def _joined(self, gathered: Words, own: SparseSum) -> tuple[SparseSum, dict[int, int], int | None]:
        """The sum of the whole from those of its shards, the marks of ranks, and where it overflows."""
        hosts, n = self.topology.num_hosts, self.whole.num_elements
        messages = ShardMessage.unpacked(np.asarray(gathered), self.topology.per_host, hosts)
        self._check_steps(np.array([one.step for one in messages]), self.topology.hosts[self.host])
        selections = [one.selection for one in messages if one.values is None]
        whole = unpack_sum(
            np.concatenate([*selections, np.empty(0, np.int32)]),
            len(selections),
            _INSIDE,
            n,
            self.whole.value_dtype,
        )
        counts = np.zeros(self.whole.size, np.int64)
        marks: dict[int, int] = {}
        overflows = []
        for local, message in enumerate(messages):
            start, stop = part(n, local, self.topology.per_host)
            column = list(self.topology.columns[local])
            counts[column] = message.counts
            if message.overflow is not None:
                overflows.append(start + message.overflow)
            for host in np.flatnonzero(message.marks).tolist():
                position = int(message.marks[host]) - 1
                if position == self.info.num_elements:  # this rank itself refuses
                    marks[column[host]] = n
                else:
                    found = min(start + position, stop - 1)
                    marks |= {rank: min(found, marks.get(rank, n)) for rank in self._spared(host, marks)}
        values = own.values[:0] if whole.values is None else whole.values
        norms = None
        if own.notes.norms is not None:  # of a host, with each of its ranks
            norms, of_shards = np.zeros(self.whole.size), np.array([one.norms for one in messages])
            for host, ranks in enumerate(self.topology.hosts):
                norms[list(ranks)] = math.sqrt(float(np.square(of_shards[:, host]).sum()))
        notes = Notes(marks, norms)
        sum_ = SparseSum(whole.indices, values, counts, notes)
        shards = [one.values for one in messages if one.values is not None]
        if shards and not selections:
            values = np.concatenate(shards).view(self.whole.value_dtype)
            if values.size != n:
                raise MessageError(f"{values.size} values arrived for a bucket of {n} elements")
            sum_ = WholeSum(values, counts, notes)
        sum_.facts = own.facts
        return sum_, marks, min(overflows, default=None)

    def _spared(self, host: int, marks: dict[int, int]) -> list[int]:
        """The ranks of a host whose sum is not finite, but for those that refuse the step by themselves."""
        n = self.whole.num_elements
        return [rank for rank in self.topology.hosts[host] if marks.get(rank) != n]


def shard_of(whole: BucketInfo, topology: Topology) -> BucketInfo:
    """The facts of a rank's shard: N ranks, and as many elements as the longest shard has.

    Example:
        >>> shard_of(BucketInfo("w", 9, rank=3, size=4), Topology.regular(2, 2))
        BucketInfo(name='w/1', num_elements=5, rank=1, size=2, dtype='float32')
    """
    host, local = topology.place(whole.rank)
    _, longest = part(whole.num_elements, 0, topology.per_host)
    # random numbers come from the name: shards do not share them
    return BucketInfo(f"{whole.name}/{local}", longest, host, topology.num_hosts, whole.dtype)
