"""A bucket on P simulated ranks: gradients in, synchronized gradients out, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.arrays import Accumulator, HostAccumulator
from horovod_sparse.checks import check_count
from horovod_sparse.feedback import Bucket, Recipe, TwoLevelBucket, shard_of
from horovod_sparse.plans.network import AlphaBeta
from horovod_sparse.simulation.lockstep import Recorder, run_lockstep
from horovod_sparse.sparsifiers import BucketInfo, SparseSum
from horovod_sparse.topology import Topology


class SimulatedCluster:
    """One bucket of n elements on P ranks of one process.

    Args:
        recipe: what every rank does.
        num_elements: n.
        size: P.
        dtype: of the gradients.
        recorder: counts rounds and bytes; a fresh one if left out.
        name: of the bucket.
        accumulator: makes the memory of a rank, called as `HostAccumulator` is.
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
        recorder: Recorder | None = None,
        name: str = "bucket",
        accumulator: Callable[..., Accumulator] = HostAccumulator,
        topology: Topology | None = None,
    ) -> None:
        self.recorder = recorder if recorder is not None else Recorder()
        self.topology = topology
        self.buckets: list[Bucket] = []
        for rank in range(size):
            whole = BucketInfo(name, num_elements, rank, size, dtype)
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
                self.buckets.append(TwoLevelBucket(whole, recipe, memory, (), topology))

    def synchronize(
        self, gradients: Sequence[Any], learning_rate: float | None = None, *, keep_errors: bool = False
    ) -> list[SparseSum]:
        steps = [
            bucket.step(gradient, learning_rate)
            for bucket, gradient in zip(self.buckets, gradients, strict=True)
        ]
        return run_lockstep(steps, self.recorder, keep_errors=keep_errors, topology=self.topology)

    def step(self, gradients: Sequence[Any], learning_rate: float | None = None) -> np.ndarray:
        """One step on all ranks; the synchronized gradient (a sum) of rank 0, dense."""
        return self.dense(self.synchronize(gradients, learning_rate)[0])

    def dense(self, sum_: SparseSum) -> np.ndarray:
        """A sparse sum as an array of n elements."""
        if sum_.whole:
            return np.array(sum_.values)
        whole = self.buckets[0].whole
        out = np.zeros(whole.num_elements, whole.value_dtype)
        np.add.at(out, sum_.indices, sum_.values)
        return out

    def residuals(self) -> list[np.ndarray]:
        """What every rank holds back, [n] each, as copies."""
        return [bucket.spread(bucket.accumulator.values()).copy() for bucket in self.buckets]


@dataclass(frozen=True)
class BucketTraffic:
    """What a bucket's synchronization puts on the network, as counted.

    Attributes:
        rounds: messages one behind the other, of the slowest rank.
        bytes_received: by the rank that receives most.
        bytes_sent: mean over ranks of what each puts in, counted once.
        union_density: share of the elements that the sum changes.
        seconds: on the network's clock.
    """

    rounds: int
    bytes_received: float
    bytes_sent: float
    union_density: float
    seconds: float


def bucket_traffic(
    recipe: Recipe,
    num_elements: int,
    size: int,
    network: AlphaBeta | None = None,
    *,
    steps: int = 2,
    seed: int = 0,
) -> BucketTraffic:
    """Runs the coroutines of P ranks on a bucket, and counts the last step.

    Gradients are drawn from a Laplace distribution, independent on every rank: nothing is shared, so
    build-up is as large as it can be.

    Args:
        recipe: sparsifier and feedback.
        num_elements: n; P accumulators of n elements are held at once.
        size: P.
        network: the clock's constants.
        steps: synchronizations; the last one counts (thresholds have settled a little).
        seed: of the gradients.

    Example:
        >>> from horovod_sparse.feedback import recipe
        >>> traffic = bucket_traffic(recipe("topk", density=0.01), 1000, size=4)
        >>> traffic.bytes_sent, traffic.rounds  # 4 header words, 10 indices, 10 values; log2(4) rounds
        (96.0, 2)
    """
    check_count("steps", steps)
    cluster = SimulatedCluster(recipe, num_elements, size)
    random, union = np.random.default_rng(seed), 0
    for _ in range(steps):
        cluster.recorder = Recorder(network or AlphaBeta())
        gradients = [random.laplace(size=num_elements).astype(np.float32) for _ in range(size)]
        sum_ = cluster.synchronize(gradients)[0]
        union = num_elements if sum_.whole else np.unique(sum_.indices).size
    recorder = cluster.recorder
    totals = [recorder.total(rank) for rank in range(size)]
    return BucketTraffic(
        rounds=max(total.rounds for total in totals),
        bytes_received=max(total.bytes_received for total in totals),
        bytes_sent=float(sum(map(sum, recorder.bytes_sent))) / size,
        union_density=union / num_elements,
        seconds=recorder.seconds,
    )
