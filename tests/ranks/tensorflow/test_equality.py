"""Every sparsifier on TensorFlow's tensors, eagerly and in a graph, against the simulated cluster."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from horovod_sparse.collectives import AllToAll, Broadcast, Exchange
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.tensorflow.tensors import numpy_dtype
from support.cases import CASES, case_id

pytestmark = pytest.mark.tensorflow

SHAPES = [(13, 11), (), (3, 4, 5), (97,)]
STEPS = 4
RATES = [0.5, 0.5, 0.25, 0.25]

_numbers = iter(range(10**6))


def _dyadic(size: int, dtype: str) -> list[list[np.ndarray]]:
    """Gradients whose sums are exact in any order: one list of arrays per rank."""
    generator = np.random.default_rng(len(SHAPES))
    kind = numpy_dtype(dtype)
    return [[(generator.integers(-96, 97, shape) / 32).astype(kind) for shape in SHAPES] for _ in range(size)]


def _check(rank, size, chosen, dtype, graph, **arguments):
    variables = [tf.Variable(tf.zeros(shape, dtype)) for shape in SHAPES]
    synchronizer = GradientSynchronizer(chosen, average=False, name=f"equal{next(_numbers)}", **arguments)

    def step(gradients, rate):
        return synchronizer.synchronize(gradients, variables, rate)

    synchronize = tf.function(step) if graph else step
    everyone, clusters = _dyadic(size, dtype), None
    for rate in RATES:
        given = [tf.constant(array) for array in everyone[rank]]
        sums = synchronize(given, tf.constant(rate))
        if clusters is None:
            clusters = [
                SimulatedCluster(
                    chosen, part.bucket.info.num_elements, size, dtype, name=part.bucket.info.name
                )
                for part in synchronizer.sparse
            ]
        for part, cluster in zip(synchronizer.sparse, clusters, strict=True):
            positions = [list(synchronizer.names).index(name) for name in part.names]
            flat = [
                np.concatenate([arrays[i].reshape(-1) for i in positions]).astype(numpy_dtype(dtype))
                for arrays in everyone
            ]
            expected = cluster.step(flat, rate).astype(numpy_dtype(dtype))
            actual = np.concatenate([sums[i].numpy().reshape(-1) for i in positions])
            assert np.array_equal(actual, expected)
            residual = cluster.buckets[rank].accumulator.values()
            assert np.array_equal(part.bucket.accumulator.values(), residual)
            assert np.array_equal(part.bucket.last.bytes_by_round, cluster.buckets[rank].last.bytes_by_round)
        for given_, array in zip(given, everyone[rank], strict=True):
            assert np.array_equal(given_.numpy(), array), "a gradient was changed"
    assert synchronizer.step == STEPS == synchronizer.telemetry.num_steps
    return synchronizer


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_the_simulation(rank, size, case, graph):
    _check(rank, size, case.recipe, "float32", graph)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["topk", "exdyna"])
def test_other_types_equal_the_simulation(rank, size, name, dtype):
    _check(rank, size, recipe(name, density=0.2), dtype, graph=True)


def test_many_buckets_equal_the_simulation(rank, size):
    synchronizer = _check(rank, size, recipe("exdyna", density=0.2), "float32", graph=True, bucket_bytes=1)
    assert len(synchronizer.parts) == len(SHAPES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ring(type(recipe("topk").sparsifier)):  # type: ignore[misc]
    """Top-k whose messages go around in pairs, or all to all: the requests that no sparsifier here makes."""

    kind: str = "exchange"

    def synchronize(self, accumulator, state, info):
        state.step += 1
        mine = np.full(info.rank + 1, info.rank, np.int32)
        if self.kind == "exchange":
            after, before = (info.rank + 1) % info.size, (info.rank - 1) % info.size
            inbox = yield Exchange({after: mine}, (before,))
            assert {peer: message.tolist() for peer, message in inbox.items()} == {
                before: [before] * (before + 1)
            }
        else:
            arrived = yield AllToAll(tuple(mine + peer for peer in range(info.size)))
            assert [message.tolist() for message in arrived] == [
                [peer + info.rank] * (peer + 1) for peer in range(info.size)
            ]
        root = state.step % info.size
        seen = yield Broadcast(np.full(3, info.rank + 0.5), root)
        assert seen.tolist() == [root + 0.5] * 3
        return (yield from super().synchronize(accumulator, state, info))

    def rounds(self, size):
        return (Exchange if self.kind == "exchange" else AllToAll, Broadcast, *super().rounds(size))


@pytest.mark.parametrize("kind", ["exchange", "alltoall"])
def test_every_kind_of_request_is_carried_out(rank, size, kind):
    chosen = dataclasses.replace(recipe("topk"), sparsifier=_Ring(density=1.0, kind=kind))
    variable = tf.Variable(tf.zeros([5]))
    synchronizer = GradientSynchronizer(chosen, average=False, name=f"kinds.{kind}")
    synchronize = tf.function(lambda gradient: synchronizer.synchronize([gradient], [variable])[0])
    for _ in range(3):  # the root moves on
        total = synchronize(tf.fill([5], float(rank + 1)))
        assert total.numpy().tolist() == [math.comb(size + 1, 2)] * 5
