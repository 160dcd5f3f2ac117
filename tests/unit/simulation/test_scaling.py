"""Scale: thousands of ranks in seconds, counted as the formulas say, and where dense begins to win."""

from __future__ import annotations

import math

import numpy as np
import pytest

from horovod_sparse.collectives import AllGather
from horovod_sparse.cost import AffineTime, AlphaBeta
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import recipe
from horovod_sparse.merging import ParameterFacts, Plan, Workload, layerwise, single
from horovod_sparse.simulation import (
    ScalePoint,
    SimulatedCluster,
    bucket_traffic,
    crossings,
    scaling_curve,
    simulated_cost,
)
from horovod_sparse.sparsifiers import base
from horovod_sparse.wire import WireFormat
from horovod_sparse.wire import message as gathered

NETWORK = AlphaBeta(alpha_seconds=1e-4, beta_seconds=1e-8)


def test_gathered_messages_are_decoded_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    original = gathered._unpack
    monkeypatch.setattr(gathered, "_unpack", lambda *a: decoded.append(a) or original(*a))
    cluster = SimulatedCluster(recipe("topk", density=0.1), num_elements=50, size=6)
    random = np.random.default_rng(0)
    grads = [random.standard_normal(50).astype(np.float32) for _ in range(6)]
    expected = np.zeros(50, np.float32)
    for gradient in grads:
        largest = np.argsort(-np.abs(gradient))[:5]
        expected[largest] += gradient[largest]
    sums = cluster.synchronize(grads)
    assert len(decoded) == 1
    np.testing.assert_allclose(cluster.dense(sums[5]), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="read-only"):
        sums[0].values[0] = 1.0  # it is everyone's


def test_what_is_shared_is_told_apart_by_how_it_is_asked_for() -> None:
    packed = base.pack(np.array([1, 3], np.int32), None, base_report(), format=WireFormat(), num_elements=9)
    shared = gathered.SharedWords.of(packed.copy())
    one = gathered.unpack_sum(shared, 1, WireFormat(), 9, None)
    assert gathered.unpack_sum(shared, 1, WireFormat(), 9, None) is one
    assert gathered.unpack_sum(shared, 1, WireFormat(), 10, None) is not one
    assert shared[1:].decoded is None


def base_report():
    from horovod_sparse.arrays.protocol import FoldReport

    return FoldReport()


def test_4096_ranks_of_top_k() -> None:
    traffic = bucket_traffic(recipe("topk", density=0.01), 400, 4096, NETWORK, steps=1)
    message = 4 * (4 + 2 * 4)  # header, 4 indices, 4 values
    assert traffic.rounds == 12
    assert traffic.bytes_sent == message
    assert traffic.bytes_received == 4095 * message
    assert traffic.seconds == pytest.approx(12 * 1e-4 + 4095 * message * 1e-8)
    assert traffic.union_density == 1.0  # 16 384 draws of 400 elements: build-up is complete


def test_4096_ranks_of_micro_send_a_union_of_k() -> None:
    # a density at which every rank has an element to search
    traffic = bucket_traffic(recipe("micro", density=0.05), 8192, 4096, NETWORK, steps=1)
    assert traffic.union_density == pytest.approx(0.05, rel=0.15)
    # indices gathered in 12 rounds, values reduced in 24, whatever P
    assert traffic.rounds == 36


def test_the_line_through_two_buckets_is_exact_for_top_k() -> None:
    simulated = simulated_cost(
        recipe("topk", density=0.01), 8, NETWORK, selection=AffineTime(), num_elements=(1000, 3000)
    )
    assert simulated.fixed_bytes == pytest.approx(16)
    assert simulated.bytes_per_element == pytest.approx(0.08)
    # log2 8 rounds, the header and n / 100 pairs of 7 others
    expected = 3 * 1e-4 + 7 * (16 + 8 * 0.01 * 1e6) * 1e-8
    assert simulated.cost.communication.seconds(1_000_000) == pytest.approx(expected)
    assert simulated.cost.dense.seconds(4_000_000) == pytest.approx(
        NETWORK.seconds(AlphaBeta.allreduce(4_000_000, 8))
    )


def test_build_up_lets_dense_win_from_some_size_on() -> None:
    facts = (ParameterFacts("a", 500_000), ParameterFacts("b", 500_000))
    workload = Workload(facts, (0.001, 0.001))
    points = scaling_curve(
        workload,
        single,
        recipe("topk", density=0.01),
        (4, 64, 512),
        NETWORK,
        selection=AffineTime(),
        num_elements=(500, 1000),
    )
    assert points[0].speedup > 1 > points[-1].speedup
    (crossing,) = crossings(points)
    # 8 bytes per selected from P - 1 ranks against 2 (P - 1) / P of 4 bytes per element: P = 1 / density
    assert crossing == pytest.approx(100, rel=0.15)
    assert all(point.bytes_per_rank == pytest.approx(16 + 80_000) for point in points)
    assert points[0].dense_bytes_per_rank == 4_000_000


def test_a_plan_may_be_given_and_keeps_what_is_dense() -> None:
    workload = Workload((ParameterFacts("a", 1000), ParameterFacts("b", 10)), (0.001, 0.001))
    arguments = {"selection": AffineTime(), "num_elements": (500, 1000)}
    plan = Plan((("a",),), ("b",))
    (point,) = scaling_curve(workload, plan, recipe("topk", density=0.1), [2], NETWORK, **arguments)
    assert point.plan == plan
    assert point.bytes_per_rank == pytest.approx(16 + 8 * 100 + 40)
    (layers,) = scaling_curve(workload, layerwise, recipe("topk", density=0.1), [2], NETWORK, **arguments)
    assert len(layers.plan.buckets) == 2


def test_crossings_are_interpolated_where_the_faster_one_changes() -> None:
    def point(size: int, sparse: float, dense: float) -> ScalePoint:
        return ScalePoint(size, sparse, dense, Plan(()), 0.0, 0.0, 0.0)

    points = [point(2, 1.0, 2.0), point(8, 2.0, 1.0), point(16, 3.0, 1.0), point(64, 1.0, 3.0)]
    first, second = crossings(points)
    assert first == pytest.approx(4.0)  # halfway in log P
    assert second == pytest.approx(32.0)
    assert crossings(points[1:3]) == []


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="num_elements"):
        simulated_cost(recipe("topk"), 2, NETWORK, selection=AffineTime(), num_elements=(10, 10))
    with pytest.raises(ArgumentError, match="steps"):
        bucket_traffic(recipe("topk"), 10, 2, steps=0)


def test_rounds_are_those_of_the_collective() -> None:
    assert recipe("topk").sparsifier.rounds(8) == (AllGather,)
    assert bucket_traffic(recipe("topk", density=0.1), 100, 9).rounds == math.ceil(math.log2(9))
