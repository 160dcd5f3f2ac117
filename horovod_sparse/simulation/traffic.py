"""What one bucket puts on the network, counted by running the coroutines of all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from horovod_sparse.checks import check_count
from horovod_sparse.collectives import Level
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning.profile import Levels
from horovod_sparse.plans.network import COLLECTIVES, HOST_NETWORK, AlphaBeta, CollectiveCost, network_at
from horovod_sparse.simulation.cluster import SimulatedCluster
from horovod_sparse.simulation.lockstep import Recorder
from horovod_sparse.topology import Topology


@dataclass(frozen=True)
class BucketTraffic:
    """What a bucket's synchronization puts on the network, as counted.

    Attributes:
        num_elements: n.
        size: P.
        rounds: messages one behind the other, of the slowest rank.
        bytes_received: by the rank that receives most.
        bytes_sent: mean over ranks of what each puts in, counted once; with two levels, in what goes among
            hosts.
        union_density: share of the elements that the sum changes.
        seconds: on the network's clock.
        costs: round -> the different costs that ranks had in it: enough for any other network.
        rounds_among: round -> the kind of collective, and among whom it was.
        per_host: L, ranks that share a host, and its network card.
    """

    num_elements: int
    size: int
    rounds: int
    bytes_received: float
    bytes_sent: float
    union_density: float
    seconds: float
    costs: tuple[frozenset[CollectiveCost], ...] = field(default=(), repr=False)
    rounds_among: tuple[tuple[str, Level], ...] = field(default=(), repr=False)
    per_host: int = 1

    def seconds_on(self, network: AlphaBeta, inside: AlphaBeta = HOST_NETWORK) -> float:
        """Seconds on another network: rounds one behind the other, each as slow as its slowest rank.

        Args:
            network: between hosts.
            inside: between the ranks of a host, where hosts have several.
        """
        num_hosts, total = self.size // self.per_host, 0.0
        for (kind, level), round_ in zip(self.rounds_among, self.costs, strict=True):
            on = network_at(kind, level, network, num_hosts, self.per_host, inside)
            total += max(map(on.seconds, round_))
        return total


def bucket_traffic(
    recipe: Recipe,
    num_elements: int,
    size: int,
    network: AlphaBeta | None = None,
    *,
    steps: int = 2,
    seed: int = 0,
    per_host: int = 1,
    levels: Levels = "flat",
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
        per_host: L, ranks that share a host, and its network card.
        levels: "host" where gradients are summed within hosts first.

    Raises:
        ArgumentError: if P is no multiple of L.

    Example:
        >>> from horovod_sparse.feedback import recipe
        >>> traffic = bucket_traffic(recipe("topk", density=0.01), 1000, size=4)
        >>> traffic.bytes_sent, traffic.rounds  # 4 header words, 10 indices, 10 values; log2(4) rounds
        (96.0, 2)
    """
    check_count("steps", steps)
    network = network or AlphaBeta()
    if size % per_host:
        raise ArgumentError("per_host", per_host, f"a number that {size} ranks are a multiple of")
    topology = Topology.regular(size // per_host, per_host) if levels == "host" else None
    cluster = SimulatedCluster(recipe, num_elements, size, topology=topology)
    random = np.random.default_rng(seed)
    union = 0
    for _ in range(steps):
        cluster.recorder = Recorder(network)
        gradients = [random.laplace(size=num_elements).astype(np.float32) for _ in range(size)]
        sum_ = cluster.synchronize(gradients)[0]
        union = num_elements if sum_.whole else np.unique(sum_.indices).size
    recorder = cluster.recorder
    totals = [recorder.total(rank) for rank in range(size)]
    sent = [
        sum(each) for each, level in zip(recorder.bytes_sent, recorder.levels, strict=True) if level != "host"
    ]
    traffic = BucketTraffic(
        num_elements=num_elements,
        size=size,
        rounds=max(total.rounds for total in totals),
        bytes_received=max(total.bytes_received for total in totals),
        bytes_sent=float(sum(sent)) / size,
        union_density=union / num_elements,
        seconds=0.0,
        costs=tuple(frozenset(round_) for round_ in recorder.costs),
        rounds_among=tuple(
            (COLLECTIVES[kind], level) for kind, level in zip(recorder.kinds, recorder.levels, strict=True)
        ),
        per_host=per_host,
    )
    return replace(traffic, seconds=traffic.seconds_on(network))
