"""What a step would take on P ranks: the real coroutines, counted, and an alpha-beta clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.planning.profile import Levels
from horovod_sparse.planning.strategies import Strategy
from horovod_sparse.planning.timeline import predict
from horovod_sparse.planning.times import AffineTime, TimeModel
from horovod_sparse.planning.workload import Workload
from horovod_sparse.plans.network import HOST_NETWORK, AlphaBeta, network_at
from horovod_sparse.plans.plan import Plan
from horovod_sparse.simulation.traffic import BucketTraffic, bucket_traffic


def break_even(
    speedup: Callable[[float], float],
    low: float,
    high: float,
    *,
    num_points: int = 13,
    precision: float = 0.005,
) -> list[float]:
    """Values between two limits at which a speedup passes 1.

    Looks at points that are evenly spaced in the logarithm, then halves every piece between two of them
    at which another one is faster. Two crossings within one piece are not seen.

    Args:
        speedup: of a value; above 1, the first of two things is faster.
        low: above 0.
        high: above `low`.
        num_points: 2 or more.
        precision: relative.

    Raises:
        ArgumentError: limits or number are of another kind.

    Example:
        >>> [round(value, 1) for value in break_even(lambda x: 10.0 / x, 1.0, 100.0, precision=0.001)]
        [10.0]
    """
    if not 0.0 < low < high:
        raise ArgumentError("low and high", (low, high), "two numbers above 0, the smaller first")
    if num_points < 2:
        raise ArgumentError("num_points", num_points, "2 or more")
    step = (math.log(high) - math.log(low)) / (num_points - 1)
    values = [math.exp(math.log(low) + number * step) for number in range(num_points)]
    values[-1] = high  # not beyond it by rounding
    faster = [speedup(value) > 1.0 for value in values]
    found = []
    for number in range(num_points - 1):
        if faster[number] == faster[number + 1]:
            continue
        left, right = values[number], values[number + 1]
        while right / left > 1.0 + precision:
            middle = math.sqrt(left * right)
            if (speedup(middle) > 1.0) == faster[number]:
                left = middle
            else:
                right = middle
        found.append(math.sqrt(left * right))
    return found


@dataclass(frozen=True)
class SimulatedCost:
    """What two simulated buckets say about all.

    Attributes:
        cost: for plans and predictions.
        fixed_bytes: that a rank puts in for a bucket of any size (headers, health).
        bytes_per_element: and for every element of it.
        traffic: of the larger bucket.
    """

    cost: CostModel
    fixed_bytes: float
    bytes_per_element: float
    traffic: BucketTraffic


def simulated_cost(
    recipe: Recipe,
    size: int,
    network: AlphaBeta,
    *,
    selection: TimeModel,
    num_elements: tuple[int, int] = (1024, 4096),
    seed: int = 0,
) -> SimulatedCost:
    """A cost model whose communication is counted, not declared: for any sparsifier.

    Two buckets are simulated, and time is taken to be affine in n: message lengths are, but for rounding
    k; so choose sizes at which density * n is well above 1, and above P for exclusive sparsifiers.

    Args:
        recipe: sparsifier and feedback.
        size: P.
        network: alpha and beta.
        selection: time of selecting by n on a rank, which the simulator cannot know.
        num_elements: of the two buckets, the smaller first.
        seed: of the gradients.

    Returns:
        The cost model, dense allreduce by the same network, and bytes.

    Raises:
        ArgumentError: unless the sizes differ, the smaller first.
    """
    simulated = simulate_traffic(recipe, size, num_elements=num_elements, seed=seed)
    return simulated.cost(network, selection)


@dataclass(frozen=True)
class SimulatedTraffic:
    """Two buckets as they were simulated: what any network would make of them.

    Attributes:
        small: the smaller bucket.
        large: the larger one.
    """

    small: BucketTraffic
    large: BucketTraffic

    def cost(
        self, network: AlphaBeta, selection: TimeModel, inside: AlphaBeta = HOST_NETWORK
    ) -> SimulatedCost:
        """The cost model on a network, with another one within hosts; see `simulated_cost`."""
        at, size = (self.small.num_elements, self.large.num_elements), self.large.size
        per_host = self.large.per_host
        seconds = [bucket.seconds_on(network, inside) for bucket in (self.small, self.large)]
        fixed, slope = _line(at, *seconds)
        fixed_bytes, bytes_per_element = _line(at, self.small.bytes_sent, self.large.bytes_sent)
        network = network_at("allreduce", "all", network, size // per_host, per_host, inside)
        startup = network.seconds(AlphaBeta.allreduce(0, size))
        per_byte = network.seconds(AlphaBeta.allreduce(2**20, size)) - startup
        dense = AffineTime(startup, per_byte / 2**20)
        cost = CostModel(selection, AffineTime(fixed, slope), dense)
        return SimulatedCost(cost, fixed_bytes, bytes_per_element, self.large)


def simulate_traffic(
    recipe: Recipe,
    size: int,
    *,
    num_elements: tuple[int, int] = (1024, 4096),
    seed: int = 0,
    per_host: int = 1,
    levels: Levels = "flat",
) -> SimulatedTraffic:
    """Runs the coroutines of P ranks on two buckets.

    Args:
        recipe: sparsifier and feedback.
        size: P.
        num_elements: of the two buckets, the smaller first; see `simulated_cost`.
        seed: of the gradients.
        per_host: see `bucket_traffic`.
        levels: likewise.

    Raises:
        ArgumentError: unless the sizes differ, the smaller first.
    """
    if not 0 < num_elements[0] < num_elements[1]:
        raise ArgumentError("num_elements", num_elements, "two sizes, the smaller first")
    options: dict[str, Any] = {"seed": seed, "per_host": per_host, "levels": levels}
    return SimulatedTraffic(*(bucket_traffic(recipe, n, size, **options) for n in num_elements))


def _line(at: tuple[int, int], one: float, other: float) -> tuple[float, float]:
    """Value at 0 and slope of the line through two points, neither below 0."""
    slope = max(0.0, (other - one) / (at[1] - at[0]))
    return max(0.0, one - slope * at[0]), slope


@dataclass(frozen=True)
class ScalePoint:
    """A step on P ranks.

    Attributes:
        size: P.
        sparse_seconds: of an iteration under the plan.
        dense_seconds: of an iteration with everything dense, fused as Horovod does.
        plan: that was predicted.
        bytes_per_rank: that a rank puts in per step with the plan, each counted once; what stays within its
            host is left out.
        dense_bytes_per_rank: the same with everything dense.
        union_density: share of elements that the sum changes.
        flat_seconds: of an iteration with one level, where this is one with two.
    """

    size: int
    sparse_seconds: float
    dense_seconds: float
    plan: Plan
    bytes_per_rank: float
    dense_bytes_per_rank: float
    union_density: float
    flat_seconds: float | None = None

    @property
    def speedup(self) -> float:
        """How many times as fast as all dense; below 1 dense wins."""
        return self.dense_seconds / self.sparse_seconds


def scaling_curve(
    workload: Workload,
    merging: Strategy | Plan,
    recipe: Recipe,
    sizes: Sequence[int],
    network: AlphaBeta,
    *,
    selection: TimeModel,
    num_elements: tuple[int, int] = (1024, 4096),
    seed: int = 0,
) -> list[ScalePoint]:
    """Predicted iteration time over the number of ranks.

    Args:
        workload: parameters and backward times of one rank; the batch of a rank stays the same (weak
            scaling).
        merging: a strategy, asked anew for every P, or one plan for all.
        recipe: sparsifier and feedback.
        sizes: numbers of ranks, 1 or more each.
        network: alpha and beta.
        selection: time of selecting by n on a rank.
        num_elements: see `simulated_cost`.
        seed: of the gradients.

    Returns:
        A point for every size, in their order.
    """
    points = []
    for size in sizes:
        traffic = simulate_traffic(recipe, size, num_elements=num_elements, seed=seed)
        points.append(scale_point(workload, merging, traffic, network, selection))
    return points


def scale_point(
    workload: Workload,
    merging: Strategy | Plan,
    traffic: SimulatedTraffic,
    network: AlphaBeta,
    selection: TimeModel,
    inside: AlphaBeta = HOST_NETWORK,
) -> ScalePoint:
    """One step, sparse and dense, of as many ranks as were simulated; see `scaling_curve`.

    Args:
        workload: parameters and backward times of one rank.
        merging: a strategy or a plan.
        traffic: of `simulate_traffic`.
        network: alpha and beta.
        selection: time of selecting by n on a rank.
        inside: alpha and beta within a host, where hosts have several ranks.
    """
    every = workload.with_dense([parameter.name for parameter in workload.parameters])
    facts = {parameter.name: parameter for parameter in workload.parameters}
    simulated = traffic.cost(network, selection, inside)
    cost = simulated.cost
    plan = merging if isinstance(merging, Plan) else merging(workload, cost)
    sparse_elements = sum(facts[name].num_elements for bucket in plan.buckets for name in bucket)
    dense_bytes = sum(facts[name].num_bytes for name in plan.dense)
    return ScalePoint(
        size=traffic.large.size,
        sparse_seconds=predict(workload, plan, cost).iteration_seconds,
        dense_seconds=predict(every, Plan((), every.dense_names), cost).iteration_seconds,
        plan=plan,
        bytes_per_rank=len(plan.buckets) * simulated.fixed_bytes
        + simulated.bytes_per_element * sparse_elements
        + dense_bytes,
        dense_bytes_per_rank=float(sum(fact.num_bytes for fact in facts.values())),
        union_density=simulated.traffic.union_density,
    )


def crossings(points: Sequence[ScalePoint]) -> list[float]:
    """Numbers of ranks at which dense begins, or ceases, to win.

    Args:
        points: of rising size.

    Returns:
        Interpolated in log P between the two points where the faster one changes; empty if none does.
    """
    found = []
    for one, other in pairwise(points):
        before, after = math.log(one.speedup), math.log(other.speedup)
        if (before > 0.0) != (after > 0.0):
            share = before / (before - after) if before != after else 0.0
            found.append(float(one.size * (other.size / one.size) ** share))
    return found
