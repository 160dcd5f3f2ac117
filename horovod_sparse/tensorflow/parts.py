"""What is synchronized as one: a bucket, or a variable that stays dense. Both as tasks of a graph."""

from __future__ import annotations

import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np

from horovod_sparse.arrays import GradientParts, HostAccumulator
from horovod_sparse.carriers.exchanges import over_hosts, rounds_over_hosts
from horovod_sparse.collectives import AllReduce, Exchange, Request, Synchronization
from horovod_sparse.feedback import Bucket, Member, Recipe, TwoLevelBucket, shard_of
from horovod_sparse.kernels import apply_scaled_sum, clear_at
from horovod_sparse.kernels.host.scatter import native_bits
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.sparsifiers.base import accumulator_dtype
from horovod_sparse.telemetry import BucketReport
from horovod_sparse.tensorflow.task import Task, is_looped
from horovod_sparse.tensorflow.tensors import ALIGNMENT, aligned_zeros, numpy_dtype
from horovod_sparse.topology import Topology
from horovod_sparse.training import parts as common
from horovod_sparse.training.agreement import kept_share
from horovod_sparse.training.parts import sum_densely

#: tells (rank, size) within the process set, at any time
Place = Callable[[], tuple[int, int]]


class Part(common.Part, Protocol):
    """Variables that are synchronized together."""

    shapes: list[tuple[int, ...]]
    dtype: str
    name: str
    task: Task

    def begin(self, learning_rate: float | None, gradients: Sequence[np.ndarray]) -> Synchronization[Any]:
        """Takes the gradients, and gives the coroutine of this step."""

    def again(self) -> Synchronization[Any]:
        """The coroutine of the same step once more, after `abandon`, of what waits here."""

    def apply(self, scale: float) -> tuple[list[np.ndarray], BucketReport]:
        """Scale times the sum over ranks, dense, by variable. The task is done."""

    def abandon(self, *, drop: bool = False, again: bool = False) -> None:
        """Takes the step back, as far as it came."""

    def close(self) -> None:
        """Takes the last step back if it has not come to its end, since something else in it failed."""

    def start_anew(self, step: int) -> None:
        """Goes on at this rank's present place, as a start of Horovod asks for."""


def make_accumulator(info: BucketInfo, recipe: Recipe) -> HostAccumulator:
    """The memory of a bucket: on the host, whatever device the gradients come from."""
    sparsifier, feedback = recipe.sparsifier, recipe.feedback
    return HostAccumulator(
        info.num_elements, info.dtype, density=sparsifier.density, companions=feedback.num_companions
    )


class SparseBucket(common.ArrayLayout, common.BucketPart):
    """A bucket of variables, sparsified."""

    def __init__(
        self,
        name: str,
        collective: str,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: str,
        recipe: Recipe,
        place: Place,
        *,
        dense: bool = False,
        hosts: Callable[[], Topology | None] = lambda: None,
    ) -> None:
        self.names: tuple[str, ...] = tuple(names)
        self.dense, self._hosts = dense, hosts
        #: see `horovod_sparse.carriers.shared_memory`: gradients are TensorFlow's, and copied
        self.lends, self.on_host = None, True
        #: see `Bucket.step`
        self.scale: float | None = None
        self.shapes, self.dtype = [tuple(shape) for shape in shapes], dtype
        self.name, self._recipe, self._place = name, recipe, place
        self.bucket = self._made(None)
        in_loop = is_looped(recipe.sparsifier, self.places[-1][1], hosts() is not None)
        self.task = Task(collective, self._kinds(), accumulator_dtype(dtype), in_loop)
        self._output = DenseOutput(self.shapes, numpy_dtype(dtype))

    @property
    def made_for(self) -> tuple[int, int]:
        """Rank and size that the sparsifier's state is made for."""
        return self.bucket.whole.rank, self.bucket.whole.size

    @property
    def topology(self) -> Topology | None:
        """Which ranks share a host, as the bucket is made for; None for one level."""
        return self.bucket.topology if isinstance(self.bucket, TwoLevelBucket) else None

    def _made(self, before: Bucket | None) -> Bucket:
        """A bucket for this rank's present place: with the memory of the one before, where it fits."""
        rank, size = self._place()
        whole, topology = BucketInfo(self.name, self.places[-1][1], rank, size, self.dtype), self._hosts()
        members = [Member(item, *span) for item, span in zip(self.names, self.places, strict=True)]
        if topology is None:
            memory = make_accumulator(whole, self._recipe) if before is None else before.accumulator
            return Bucket(whole, self._recipe, memory, members)
        if before is None:
            memory = make_accumulator(shard_of(whole, topology), self._recipe)
        else:
            memory = before.accumulator
        return TwoLevelBucket(whole, self._recipe, memory, members, topology)

    def _kinds(self) -> tuple[type[Request], ...]:
        kinds = self.bucket.recipe.sparsifier.rounds(self.bucket.info.size)
        return kinds if self.topology is None else rounds_over_hosts(kinds, self.topology)

    def begin(self, learning_rate: float | None, gradients: Sequence[np.ndarray]) -> Synchronization[Any]:
        self.close()
        if self.made_for != self._place():  # the process set's: Horovod itself has not been started
            self.start_anew(self.bucket.progress.step)
        return self._carried(self.bucket.step(GradientParts(gradients), learning_rate, scale=self.scale))

    def again(self) -> Synchronization[Any]:
        step = self.bucket.again(scale=self.scale)
        return self._carried(step if self.topology is None else _without_sum(step, self.topology))

    def _carried(self, step: Synchronization[Any]) -> Synchronization[Any]:
        return step if self.topology is None else over_hosts(step, self.topology, self._place()[0])

    def apply(self, scale: float) -> tuple[list[np.ndarray], BucketReport]:
        started = time.perf_counter()
        sum_ = self.task.result
        arrays, num_union = self._output.write(None if sum_.whole else sum_.indices, sum_.values, scale)
        self.task.settled = True
        self.bucket.accept()
        return arrays, BucketReport(
            step=self.bucket.last,
            num_union=num_union,
            dense_bytes=self.bucket.whole.num_elements * self._output.dtype.itemsize,
            norms=sum_.norms,
            apply_seconds=time.perf_counter() - started,
        )

    def abandon(self, *, drop: bool = False, again: bool = False) -> None:
        self.bucket.abandon(drop=drop, again=again)
        self.task.settled = True

    def close(self) -> None:
        if not self.task.settled:
            self.task.drop()
            self.abandon()

    def start_anew(self, step: int) -> None:
        """The sparsifier's state anew; the residual is kept, so that its mean over ranks stays."""
        before, stays = self.bucket, self.topology == self._hosts()
        if self.topology is not None and self.made_for != self._place():
            stays = False  # other ranks have other shards: what is another one's waits to be brought to it
        share = kept_share(self.made_for[1], self._place()[1])
        held = list(self.held())
        for number in range(len(held) if getattr(before.feedback, "adds_up", True) else 1):
            held[number] = held[number] * share
        held = [] if stays and share == 1.0 else held
        self.bucket = self._made(before if stays else None)
        if stays and isinstance(before, TwoLevelBucket) and isinstance(self.bucket, TwoLevelBucket):
            self.bucket.elsewhere = before.elsewhere  # `assign` makes it anew where it is scaled
        self.bucket.restart(dataclasses.replace(before.progress, step=step))
        if held:
            self.assign(held)
        if self.task.looped or not stays:  # a graph that was traced before is fixed, if not looped
            self.task.kinds = self._kinds()

    def take_back(self, names: Collection[str]) -> None:
        """Puts the last step's sum of these variables, which nobody applies, back where it came from.

        Each rank's residual gets its share, which keeps the mean of the residuals.
        """
        # those that hold the same elements: with two levels the ranks of a column
        sum_, share = self.task.result, 1.0 / self.bucket.info.size
        first, last = (
            self.bucket.shard if isinstance(self.bucket, TwoLevelBucket) else (0, self.places[-1][1])
        )
        for name, (start, stop) in zip(self.names, self.places, strict=True):
            if name in names:
                inside = (sum_.indices >= max(start, first)) & (sum_.indices < min(stop, last))
                indices, which = np.unique(sum_.indices[inside], return_inverse=True)
                total = np.bincount(which, weights=sum_.values[inside], minlength=indices.size)
                self.bucket.accumulator.add(
                    indices - np.int32(first), (total * share).astype(sum_.values.dtype)
                )


def _without_sum(step: Synchronization[Any], topology: Topology) -> Synchronization[Any]:
    """A step of two levels that has summed within hosts before: a graph has the round nevertheless."""
    if topology.per_host > 1:
        yield Exchange({}, ())
    return (yield from step)


class DenseVariable(common.ArrayLayout, common.DensePart):
    """A variable that a plan leaves dense: an allreduce of all its elements.

    Half types are summed in float32.
    """

    def __init__(self, name: str, collective: str, shape: tuple[int, ...], dtype: str, place: Place) -> None:
        self.names: tuple[str, ...] = (name,)
        self.shapes, self.dtype, self.num_elements = [tuple(shape)], dtype, math.prod(shape)
        self.name, self._place, self._size = name, place, place()[1]
        self.task = Task(collective, (AllReduce,), accumulator_dtype(dtype), dense=True)
        #: of this step
        self._given = _NOTHING

    def begin(self, learning_rate: float | None, gradients: Sequence[np.ndarray]) -> Synchronization[Any]:
        self._given = gradients[0]
        return self.again()

    def again(self) -> Synchronization[Any]:
        wide = self._given.reshape(-1).astype(accumulator_dtype(self.dtype))
        carried = 0 if self.carried is None else self.carried
        return sum_densely(self.names[0], wide, carried, self._place())

    def apply(self, scale: float) -> tuple[list[np.ndarray], BucketReport]:
        started = time.perf_counter()
        total = self.task.result
        dense = (total * total.dtype.type(scale)).astype(numpy_dtype(self.dtype)).reshape(self.shapes[0])
        self.carried, self._given = None, _NOTHING
        took = time.perf_counter() - started
        return [dense], self.report(self._place()[1], total.itemsize, dense.nbytes, took)

    def close(self) -> None:
        self._given = _NOTHING
        if self.task.under_way:
            self.task.drop()

    def abandon(self, *, drop: bool = False, again: bool = False) -> None:
        if drop:
            self._given = np.zeros_like(self._given)

    def start_anew(self, step: int) -> None:
        size = self._place()[1]
        if self.carried is not None:
            self.carried *= kept_share(self._size, size)
        self._size = size


_NOTHING: np.ndarray = np.empty(0, np.float32)
#: scattered elements above this share of the memory are cleared faster by clearing all of it
_SPARSE_SHARE = 1 / 8
#: memories that are kept: eager loops hold the last step's gradients while they compute the next ones
_NUM_KEPT = 2


class _Memory:
    def __init__(self, num_elements: int, dtype: np.dtype[Any]) -> None:
        self.flat = aligned_zeros(num_elements * dtype.itemsize).view(dtype)
        #: None: everywhere
        self.scattered: np.ndarray | None = np.empty(0, np.int32)
        self.lent: list[weakref.ref[np.ndarray]] = []

    @property
    def is_free(self) -> bool:
        return not any(ref() is not None for ref in self.lent)

    def clear(self) -> None:
        if self.scattered is None or self.scattered.size > _SPARSE_SHARE * self.flat.size:
            self.flat[...] = 0
        elif self.scattered.size:
            clear_at(self.flat, self.scattered)


class DenseOutput:
    """Gives out the dense gradients of a bucket's parameters; writes k elements, not n.

    TensorFlow takes an aligned NumPy array as a tensor's memory, never writes to it, and lets go of
    the array with the last tensor. Memory whose arrays are all let go of is used for a later step,
    where only the places that hold something have to be cleared.

    Example:
        >>> output = DenseOutput([(2,), (1, 3)], np.dtype(np.float32))
        >>> arrays, num_union = output.write(np.array([1, 4], np.int32), np.ones(2, np.float32), 0.5)
        >>> [array.tolist() for array in arrays], num_union
        ([[0.0, 0.5], [[0.0, 0.0, 0.5]]], 2)
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> None:
        self.shapes, self.dtype = [tuple(shape) for shape in shapes], dtype
        self._lengths = [math.prod(shape) for shape in self.shapes]
        self._starts = np.cumsum([0, *self._lengths[:-1]])
        per_line = ALIGNMENT // dtype.itemsize
        padded = [-(-length // per_line) * per_line for length in self._lengths]
        self._offsets = np.cumsum([0, *padded[:-1]])
        self._num_elements = int(sum(padded))
        self._shifts = (self._offsets - self._starts).astype(np.int32)
        self._is_shifted = bool(self._shifts.any())
        self._computable = _computable(dtype)
        self._memories: list[_Memory] = []

    def write(
        self, indices: np.ndarray | None, values: np.ndarray, scale: float
    ) -> tuple[list[np.ndarray], int]:
        """Scatters a sum into zeros."""
        memory = self._free_memory(clear=indices is not None)
        flat = native_bits(memory.flat).view(self._computable)
        if indices is None:
            memory.scattered = None
            for offset, start, length in zip(self._offsets, self._starts, self._lengths, strict=True):
                apply_scaled_sum(flat[offset : offset + length], None, values[start : start + length], scale)
            return self._given(memory), values.size
        where = indices
        if self._is_shifted:
            where = indices + self._shifts[np.searchsorted(self._starts, indices, side="right") - 1]
        memory.scattered = where
        num_union = apply_scaled_sum(flat, where, values, scale)
        return self._given(memory), num_union

    def _given(self, memory: _Memory) -> list[np.ndarray]:
        arrays = [
            memory.flat[offset : offset + length].reshape(shape)
            for offset, length, shape in zip(self._offsets, self._lengths, self.shapes, strict=True)
        ]
        memory.lent = [weakref.ref(array) for array in arrays]
        return arrays

    def _free_memory(self, clear: bool) -> _Memory:
        for memory in self._memories:
            if memory.is_free:
                if clear:
                    memory.clear()
                return memory
        memory = _Memory(self._num_elements, self.dtype)
        self._memories = [*self._memories[-(_NUM_KEPT - 1) :], memory]
        return memory


def _computable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that scattering knows: bfloat16 as its bits."""
    return np.dtype(np.uint16) if dtype.name == "bfloat16" else dtype
