"""Simulates a bucket on P ranks: takes gradients, returns their sums, and records the traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horovod_sparse.arrays import Accumulator, HostAccumulator
from horovod_sparse.feedback import Bucket, Recipe
from horovod_sparse.feedback.two_level_bucket import TwoLevelBucket, shard_of
from horovod_sparse.simulation.lockstep import Recorder, run_lockstep
from horovod_sparse.sparsifiers import BucketInfo, SparseSum
from horovod_sparse.topology import Topology


class SimulatedCluster:
    """Simulates P ranks that synchronize a bucket of n elements, in one process.

    Args:
        recipe: every rank's sparsifier and feedback.
        num_elements: n.
        size: P.
        dtype: dtype of the gradients.
        name: name of the bucket.
        accumulator: class of a rank's accumulator, with the arguments of `HostAccumulator`.
        topology: which ranks share a host, for two levels; None for one.

    Example:
        >>> from horovod_sparse.feedback import recipe
        >>> cluster = SimulatedCluster(recipe("topk", density=0.5), num_elements=2, size=2)
        >>> cluster.step([np.array([3.0, 1.0], np.float32), np.array([1.0, 2.0], np.float32)])
        array([3., 2.], dtype=float32)
    """

    def __init__(
        self,
        recipe: Recipe,
        num_elements: int,
        size: int,
        dtype: str = "float32",
        name: str = "bucket",
        number: int | None = None,
        accumulator: Callable[..., Accumulator] = HostAccumulator,
        topology: Topology | None = None,
    ) -> None:
        self.recorder = Recorder()
        self.topology = topology
        self.buckets: list[Bucket] = []
        for rank in range(size):
            whole = BucketInfo(name, num_elements, rank, size, dtype, number)
            info = whole if topology is None else shard_of(whole, topology)
            memory = accumulator(
                info.num_elements,
                info.value_dtype,
                density=recipe.sparsifier.density,
                companions=recipe.feedback.num_companions,
            )
            if topology is None:
                self.buckets.append(Bucket(info, recipe, memory))
            else:
                self.buckets.append(TwoLevelBucket(whole, recipe, memory, None, topology))

    def synchronize(
        self, gradients: Sequence[Any], learning_rate: float = 1.0, *, keep_errors: bool = False
    ) -> list[SparseSum]:
        """Synchronizes one gradient per rank, and returns each rank's sum."""
        pairs = zip(self.buckets, gradients, strict=True)
        steps = [bucket.step(gradient, learning_rate) for bucket, gradient in pairs]
        return run_lockstep(steps, self.recorder, keep_errors=keep_errors, topology=self.topology)

    def step(self, gradients: Sequence[Any], learning_rate: float = 1.0) -> np.ndarray:
        """Synchronizes one gradient per rank, and returns the sum as rank 0 gets it, an array [n]."""
        return self.dense(self.synchronize(gradients, learning_rate)[0])

    def dense(self, sum_: SparseSum) -> np.ndarray:
        """Returns a sparse sum as an array [n]."""
        if sum_.whole:
            return np.array(sum_.values)
        whole = self.buckets[0].whole
        out = np.zeros(whole.num_elements, whole.value_dtype)
        np.add.at(out, sum_.indices, sum_.values)
        return out

    def residuals(self) -> list[np.ndarray]:
        """Returns copies of the residuals of all ranks, [n] each."""
        return [bucket.spread_shard(bucket.accumulator.values()).copy() for bucket in self.buckets]
