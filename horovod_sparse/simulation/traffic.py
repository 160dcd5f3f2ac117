"""What one bucket puts on the network, counted by running the coroutines of all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from horovod_sparse.checks import check_count
from horovod_sparse.cost import AlphaBeta, CollectiveCost
from horovod_sparse.feedback import Recipe
from horovod_sparse.simulation.cluster import SimulatedCluster
from horovod_sparse.simulation.lockstep import Recorder


@dataclass(frozen=True)
class BucketTraffic:
    """What a bucket's synchronization puts on the network, as counted.

    Attributes:
        num_elements: n.
        size: P.
        rounds: messages one behind the other, of the slowest rank.
        bytes_received: by the rank that receives most.
        bytes_sent: mean over ranks of what each puts in, counted once.
        union_density: share of the elements that the sum changes.
        seconds: on the network's clock.
        costs: round -> the different costs that ranks had in it: enough for any other network.
    """

    num_elements: int
    size: int
    rounds: int
    bytes_received: float
    bytes_sent: float
    union_density: float
    seconds: float
    costs: tuple[frozenset[CollectiveCost], ...] = field(default=(), repr=False)

    def seconds_on(self, network: AlphaBeta) -> float:
        """Seconds on another network: rounds one behind the other, each as slow as its slowest rank."""
        return float(sum(max(map(network.seconds, round_)) for round_ in self.costs))


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
    network = network or AlphaBeta()
    cluster = SimulatedCluster(recipe, num_elements, size)
    random = np.random.default_rng(seed)
    union = 0
    for _ in range(steps):
        cluster.recorder = Recorder(network)
        gradients = [random.laplace(size=num_elements).astype(np.float32) for _ in range(size)]
        union = np.unique(cluster.synchronize(gradients)[0].indices).size
    recorder = cluster.recorder
    totals = [recorder.total(rank) for rank in range(size)]
    return BucketTraffic(
        num_elements=num_elements,
        size=size,
        rounds=max(total.rounds for total in totals),
        bytes_received=max(total.bytes_received for total in totals),
        bytes_sent=float(sum(map(sum, recorder.bytes_sent))) / size,
        union_density=union / num_elements,
        seconds=recorder.seconds,
        costs=tuple(frozenset(round_) for round_ in recorder.costs),
    )
