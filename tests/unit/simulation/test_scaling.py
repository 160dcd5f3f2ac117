"""Scale: thousands of ranks in seconds, counted as the formulas say, and where dense begins to win."""

import numpy as np
import pytest

from horovod_sparse.cost import AffineTime, AlphaBeta
from horovod_sparse.feedback import recipe
from horovod_sparse.merging import ParameterFacts, Workload, single
from horovod_sparse.simulation import (
    SimulatedCluster,
    break_even,
    bucket_traffic,
    crossings,
    scaling_curve,
    simulated_cost,
)
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


def test_4096_ranks_of_top_k() -> None:
    traffic = bucket_traffic(recipe("topk", density=0.01), 400, 4096, NETWORK, steps=1)
    message = 4 * (4 + 2 * 4)  # header, 4 indices, 4 values
    assert traffic.rounds == 12
    assert traffic.bytes_sent == message
    assert traffic.bytes_received == 4095 * message
    assert traffic.seconds == pytest.approx(12 * 1e-4 + 4095 * message * 1e-8)
    assert traffic.union_density == 1.0  # 16 384 draws of 400 elements: build-up is complete


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


def test_break_even_finds_every_change():
    assert break_even(lambda x: (x - 3) * (x - 40) + 1, 1, 100, precision=1e-4) == pytest.approx(
        [3, 40], rel=1e-3
    )
    assert break_even(lambda x: 0.5, 1, 2) == []
