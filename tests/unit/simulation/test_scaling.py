"""Scale: thousands of ranks in seconds, counted as the formulas say."""

import numpy as np
import pytest

from horovod_sparse.cost import AlphaBeta
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster, bucket_traffic
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
