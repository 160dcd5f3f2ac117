"""Makes buckets, each with the task that runs it in graphs, and dense gradients of their sums."""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from horovod_sparse.arrays import GradientParts
from horovod_sparse.carriers import over_hosts, rounds_over_hosts
from horovod_sparse.collectives import Synchronization
from horovod_sparse.kernels.host.scatter import apply_scaled_sums
from horovod_sparse.sparsifiers.base import accumulator_dtype
from horovod_sparse.telemetry import BucketReport
from horovod_sparse.tensorflow.task import Task, rounds_may_vary
from horovod_sparse.tensorflow.tensors import ReusedArrays, numpy_dtype
from horovod_sparse.topology import RankAndSize, Topology
from horovod_sparse.training import parts as common
from horovod_sparse.training.engine import Facts, PartSpec


def _collective_name(label: str, name: str, names: Sequence[str]) -> str:
    """Returns the name of a part's collectives, equal on all ranks, different under another plan."""
    return f"{label}.{zlib.crc32(repr((name, names)).encode()):08x}"


class Part(common.BucketPart):
    def __init__(
        self,
        spec: PartSpec,
        facts: Facts,
        ranks: RankAndSize,
        topology: Topology | None,
        *,
        label: str,
        scale: float | None = None,
    ) -> None:
        self.dtype = facts[spec.names[0]][0].dtype
        shapes = [facts[name][1].shape for name in spec.names]
        super().__init__(spec, shapes, ranks, self.dtype, topology=topology)
        #: see `Bucket.step`
        self._scale = scale
        self._rank, self._topology = ranks[0], topology
        kinds = self.bucket.recipe.sparsifier.rounds(self.bucket.info.size)
        kinds = kinds if topology is None else rounds_over_hosts(kinds, topology)
        waits = rounds_may_vary(spec.recipe.sparsifier, self.bucket.whole.num_elements, topology is not None)
        collective = _collective_name(label, self.name, self.names)
        self.task = Task(collective, kinds, accumulator_dtype(self.dtype), waits, f"{label}.{self.name}")
        self._outputs = ReusedArrays(self.shapes, numpy_dtype(self.dtype))

    def begin(self, learning_rate: float | None, gradients: Sequence[np.ndarray]) -> Synchronization[Any]:
        """Returns the coroutine of a step: folds these gradients, and exchanges the selections."""
        self.roll_back_unapplied()
        step = self.bucket.step(GradientParts(gradients), learning_rate, scale=self._scale)
        return step if self._topology is None else over_hosts(step, self._topology, self._rank)

    def apply(self, scale: float) -> tuple[list[np.ndarray], BucketReport]:
        """Returns each variable's sum over ranks times `scale`, dense, and commits the step."""
        started = time.perf_counter()
        sum_ = self.task.result
        arrays, indices = self._outputs.acquire(), None if sum_.whole else sum_.indices
        num_union = apply_scaled_sums(arrays, self.spans, indices, sum_.values, scale)
        self.task.settled = True
        self.bucket.accept()
        return arrays, BucketReport(
            step=self.bucket.last,
            num_union=num_union,
            dense_bytes=self.bucket.whole.num_elements * self._outputs.dtype.itemsize,
            norms=sum_.notes.norms,
            apply_seconds=time.perf_counter() - started,
        )

    def abandon(self, *, drop: bool = False) -> None:
        """Rolls the step back: the selection returns to the residual."""
        self.bucket.abandon(drop=drop)
        self.task.settled = True

    def roll_back_unapplied(self) -> None:
        """Rolls the last step back if its sum was not applied; called before a step, load or agreement."""
        if not self.task.settled:
            self.task.drop()
            self.abandon()

    def take_back(self, names: Collection[str]) -> None:
        """Adds these variables' last sum to the residuals in equal shares, when no rank applies it."""
        # ranks that hold the same elements; with two levels those of a column
        sum_, share = self.task.result, 1.0 / self.bucket.info.size
        first, last = self.bucket.shard
        for name, (start, stop) in zip(self.names, self.spans, strict=True):
            if name in names:
                inside = (sum_.indices >= max(start, first)) & (sum_.indices < min(stop, last))
                indices, which = np.unique(sum_.indices[inside], return_inverse=True)
                total = np.bincount(which, weights=sum_.values[inside], minlength=indices.size)
                self.bucket.accumulator.add(
                    indices - np.int32(first), (total * share).astype(sum_.values.dtype)
                )
