"""Messages between two ranks in TensorFlow: over MPI where all can, else over Horovod's all-to-all."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.feedback import recipe
from horovod_sparse.merging import min_elements
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.tensorflow import transport
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer

pytestmark = [pytest.mark.tensorflow, pytest.mark.controllers]

NUM_BUCKETS, N = 5, 400


def needs_mpi():
    if not hvd.mpi_enabled():
        pytest.skip("refused where Horovod runs on Gloo")


@pytest.fixture(params=["auto", "alltoall", "pairs"])
def way(request, monkeypatch):
    """Which transport the next choice makes."""
    monkeypatch.setattr(transport, "_pairs_threads", {})
    if request.param == "pairs":
        needs_mpi()
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", request.param)
    return request.param


def words(way: str) -> str:
    if way == "alltoall":
        return "Horovod's all-to-all (HOROVOD_SPARSE_TRANSPORT says so)"
    if hvd.mpi_enabled() and hvd.mpi_threads_supported():
        return "MPI, on a communicator of their own (every rank can)"
    return "Horovod's all-to-all (Horovod does not run on MPI)"


@pytest.mark.parametrize(
    "graph", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["eager", "graph"]
)
@pytest.mark.parametrize("name", ["spardl", "topk", "exdyna"])
def test_several_buckets_equal_the_simulation(rank, size, way, name, graph):
    """Bit for bit, in whatever order graphs run them; telemetry says how messages travel, and why."""
    chosen = recipe(name, density=0.05)
    synchronizer = GradientSynchronizer(
        chosen, average=False, bucket_bytes=1, name=f"thread.{way}.{name}.{graph}"
    )
    variables = [tf.Variable(tf.zeros([N + i])) for i in range(NUM_BUCKETS)]
    clusters = [SimulatedCluster(chosen, N + i, size) for i in range(NUM_BUCKETS)]

    def step(gradients):
        return synchronizer.synchronize(gradients, variables)

    synchronize = tf.function(step) if graph else step
    generator = np.random.default_rng(size)
    for _ in range(4):
        given = [generator.standard_normal((size, N + i)).astype(np.float32) for i in range(NUM_BUCKETS)]
        sums = synchronize([tf.constant(gradients[rank]) for gradients in given])
        for sum_, gradients, cluster in zip(sums, given, clusters, strict=True):
            expected = cluster.step(list(gradients))
            if (
                name == "exdyna"
            ):  # an allreduce adds up in an order of its own, and so do messages between pairs
                np.testing.assert_allclose(sum_.numpy(), expected, rtol=1e-5, atol=1e-6)
            else:
                assert sum_.numpy().tobytes() == expected.tobytes()
    if name == "exdyna":
        assert synchronizer.telemetry.transport == (words(way) if way == "pairs" else "")
        return
    held = {part.names[0]: part.bucket.accumulator.values() for part in synchronizer.sparse}
    assert len(held) == NUM_BUCKETS
    for i, variable_name in enumerate(synchronizer.names):
        assert held[variable_name].tobytes() == clusters[i].buckets[rank].accumulator.values().tobytes()
    assert synchronizer.telemetry.transport == ("" if name == "topk" and way != "pairs" else words(way))
    assert synchronizer.telemetry.last.wait_seconds >= 0.0


def test_within_a_process_set(rank, size, way, process_set):
    """Ranks count within the set, and those outside take no part."""
    ranks = sorted({0, size - 1})
    chosen = process_set(ranks)
    if rank not in ranks:
        return
    variable = tf.Variable(tf.zeros([20]))
    synchronizer = GradientSynchronizer(
        recipe("spardl", density=1.0), average=False, process_set=chosen, name=f"inner.{way}"
    )
    total = synchronizer.synchronize([tf.fill([20], float(rank + 1))], [variable])[0]
    assert total.numpy().tolist() == [float(size + 1)] * 20
    assert synchronizer.telemetry.transport == words(way)


def test_dense_gradients_stay_with_horovod(rank, size, monkeypatch):
    """Beside buckets that do not, in rounds of the same kind."""
    needs_mpi()
    monkeypatch.setattr(transport, "_pairs_threads", {})
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", "pairs")
    entrusted = []

    class Noted(transport.PairsSynchronization):
        def __init__(self, name, *more):
            entrusted.append(name)
            super().__init__(name, *more)

    monkeypatch.setattr("horovod_sparse.tensorflow.task.PairsSynchronization", Noted)
    shapes = {"wide": (40, 30), "bias": (7,), "second": (20, 30)}
    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]
    compression = hvd.Compression.topk(density=1.0)

    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable) for variable in variables]) * float(rank + 1)
        tape = hvd.DistributedGradientTape(
            tape, compression=compression, tensor_selection=min_elements(100), bucket_bytes=1
        )
        return tape.gradient(loss, variables)

    for _ in range(2):
        for found in gradients():
            assert set(found.numpy().reshape(-1).tolist()) == {(size + 1) / 2}
    assert compression.plan.dense == ("bias",)
    assert len(entrusted) == 4 and len(set(entrusted)) == 2
    assert compression.telemetry.transport == words("pairs")
