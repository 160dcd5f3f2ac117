"""Makes buckets, each with the task that runs it in graphs, and dense gradients of their sums."""

from __future__ import annotations

import math
import time
import weakref
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from horovod_sparse.arrays import GradientParts
from horovod_sparse.carriers.exchanges import over_hosts, rounds_over_hosts
from horovod_sparse.collectives import Synchronization
from horovod_sparse.kernels import apply_scaled_sum
from horovod_sparse.kernels.host.scatter import native_bits
from horovod_sparse.sparsifiers.base import accumulator_dtype
from horovod_sparse.telemetry import BucketReport
from horovod_sparse.tensorflow.task import Task, has_open_rounds
from horovod_sparse.tensorflow.tensors import ALIGNMENT, aligned_zeros, numpy_dtype
from horovod_sparse.topology import Topology
from horovod_sparse.training import parts as common
from horovod_sparse.training.engine import Facts, PartSpec


def _collective(label: str, name: str, names: Sequence[str]) -> str:
    """Names a part's collectives, alike on all ranks, and differently under another plan."""
    return f"{label}.{zlib.crc32(repr((name, names)).encode()):08x}"


class Part(common.BucketPart):
    def __init__(
        self,
        spec: PartSpec,
        facts: Facts,
        place: tuple[int, int],
        topology: Topology | None,
        *,
        label: str,
        scale: float | None = None,
    ) -> None:
        self.dtype = facts[spec.names[0]][0].dtype
        shapes = [facts[name][1].shape for name in spec.names]
        super().__init__(spec, shapes, place, self.dtype, topology=topology)
        #: see `Bucket.step`
        self._scale = scale
        self._rank, self._topology = place[0], topology
        kinds = self.bucket.recipe.sparsifier.rounds(self.bucket.info.size)
        kinds = kinds if topology is None else rounds_over_hosts(kinds, topology)
        waits = has_open_rounds(spec.recipe.sparsifier, self.bucket.whole.num_elements, topology is not None)
        collective = _collective(label, self.name, self.names)
        self.task = Task(collective, kinds, accumulator_dtype(self.dtype), waits, f"{label}.{self.name}")
        self._output = DenseOutput(self.shapes, numpy_dtype(self.dtype))

    def begin(self, learning_rate: float | None, gradients: Sequence[np.ndarray]) -> Synchronization[Any]:
        """Takes the gradients, and gives the coroutine of this step."""
        self.close()
        step = self.bucket.step(GradientParts(gradients), learning_rate, scale=self._scale)
        return step if self._topology is None else over_hosts(step, self._topology, self._rank)

    def apply(self, scale: float) -> tuple[list[np.ndarray], BucketReport]:
        """Returns scale times the sum over ranks, dense, by variable, and settles the task."""
        started = time.perf_counter()
        sum_ = self.task.result
        arrays, num_union = self._output.write(None if sum_.whole else sum_.indices, sum_.values, scale)
        self.task.settled = True
        self.bucket.accept()
        return arrays, BucketReport(
            step=self.bucket.last,
            num_union=num_union,
            dense_bytes=self.bucket.whole.num_elements * self._output.dtype.itemsize,
            norms=sum_.notes.norms,
            apply_seconds=time.perf_counter() - started,
        )

    def abandon(self, *, drop: bool = False) -> None:
        """Takes the step back, as far as it came."""
        self.bucket.abandon(drop=drop)
        self.task.settled = True

    def close(self) -> None:
        """Takes the last step back if it has not come to its end, since something else in it failed."""
        if not self.task.settled:
            self.task.drop()
            self.abandon()

    def take_back(self, names: Collection[str]) -> None:
        """Puts the last sum of variables that nobody applies back: each rank's residual gets its share."""
        # those that hold the same elements: with two levels the ranks of a column
        sum_, share = self.task.result, 1.0 / self.bucket.info.size
        first, last = self.bucket.shard
        for name, (start, stop) in zip(self.names, self.places, strict=True):
            if name in names:
                inside = (sum_.indices >= max(start, first)) & (sum_.indices < min(stop, last))
                indices, which = np.unique(sum_.indices[inside], return_inverse=True)
                total = np.bincount(which, weights=sum_.values[inside], minlength=indices.size)
                self.bucket.accumulator.add(
                    indices - np.int32(first), (total * share).astype(sum_.values.dtype)
                )


#: memories that are kept: eager loops hold the last step's gradients while they compute the next ones
_NUM_KEPT = 2


class _Memory:
    def __init__(self, num_elements: int, dtype: np.dtype[Any]) -> None:
        self.flat = aligned_zeros(num_elements * dtype.itemsize).view(dtype)
        self.lent: list[weakref.ref[np.ndarray]] = []

    @property
    def is_free(self) -> bool:
        return not any(ref() is not None for ref in self.lent)


class DenseOutput:
    """Gives out the dense gradients of a bucket's parameters.

    TensorFlow takes an aligned NumPy array as a tensor's memory, and lets go of it with the last tensor. It
    is used for a later step then.
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
        """Writes scale times a sum among zeros; returns arrays by parameter, and the size of the union."""
        memory = self._free_memory()
        flat = native_bits(memory.flat).view(self._computable)
        if indices is None:
            for offset, start, length in zip(self._offsets, self._starts, self._lengths, strict=True):
                apply_scaled_sum(flat[offset : offset + length], None, values[start : start + length], scale)
            return self._given(memory), values.size
        where = indices
        if self._is_shifted:
            where = indices + self._shifts[np.searchsorted(self._starts, indices, side="right") - 1]
        num_union = apply_scaled_sum(flat, where, values, scale)
        return self._given(memory), num_union

    def _given(self, memory: _Memory) -> list[np.ndarray]:
        arrays = [
            memory.flat[offset : offset + length].reshape(shape)
            for offset, length, shape in zip(self._offsets, self._lengths, self.shapes, strict=True)
        ]
        memory.lent = [weakref.ref(array) for array in arrays]
        return arrays

    def _free_memory(self) -> _Memory:
        for memory in self._memories:
            if memory.is_free:
                return memory
        memory = _Memory(self._num_elements, self.dtype)
        self._memories = [*self._memories[-(_NUM_KEPT - 1) :], memory]
        return memory


def _computable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype that scattering knows: bfloat16 as its bits."""
    return np.dtype(np.uint16) if dtype.name == "bfloat16" else dtype
