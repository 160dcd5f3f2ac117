"""Tapes of ours and of stock Horovod with a sparsifier, under real ranks: like dense where all is sent."""

from __future__ import annotations

import functools

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.errors import ArgumentError, UnsupportedError
from support.tapes import WRAPPERS, random_gradients, train

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize(
    ("arguments", "wrapper", "graph"),
    [
        ({"groups": [[0, 2], [1]]}, "ours", True),
        ({"gradient_predivide_factor": 2.0}, "stock", True),
        pytest.param({"op": hvd.Sum, "groups": 2}, "ours", False, marks=pytest.mark.nightly),
        pytest.param({"op": hvd.Sum, "groups": 2}, "stock", False, marks=pytest.mark.nightly),
    ],
)
def test_density_1_is_dense(rank, size, wrapper, graph, arguments):
    gradients = random_gradients(rank)
    expected = train(stock.DistributedGradientTape, stock.Compression.none, graph, gradients, **arguments)
    compression = hvd.Compression.exdyna(density=1.0)
    actual = train(WRAPPERS[wrapper], compression, graph, gradients, **arguments)
    if size == 2:
        assert np.array_equal(actual, expected)
    else:  # a third is not exact, and Horovod's order of summation is its own
        assert np.allclose(actual, expected, rtol=0, atol=1e-6)
    assert compression.telemetry.num_steps == len(gradients)
    assert compression.telemetry.last.density_union == 1.0


@pytest.mark.controllers
@pytest.mark.parametrize(
    "graph", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["eager", "graph"]
)
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "partial"])
def test_a_rank_outside_of_the_process_set_gets_its_own(rank, size, wrapper, graph, process_set):
    """As in stock Horovod; the others go on, and all of them meet afterwards."""
    inner = process_set([0])
    local, shared = tf.Variable(tf.ones([2])), tf.Variable(tf.ones([3]))
    compression = hvd.Compression.topk(density=1.0)

    def run(wrap, compression):
        made = functools.partial(gradients, wrap, compression)
        return [gradient.numpy().tolist() for gradient in (tf.function(made) if graph else made)()]

    def gradients(wrap, compression):
        with tf.GradientTape() as tape:
            loss = (rank + 1.0) * (tf.reduce_sum(shared) + tf.reduce_sum(local))
        tape = wrap(tape, compression=compression, process_set=inner)
        if wrapper == "partial":
            tape.register_local_source(local)
        return tape.gradient(loss, [local, shared])

    expected = run(stock.DistributedGradientTape, stock.Compression.none)
    assert expected == [[rank + 1.0] * 2, [rank + 1.0] * 3]
    wrap = WRAPPERS.get(wrapper, hvd.DistributedGradientTape)
    for _ in range(2):
        assert run(wrap, compression) == expected
    assert float(hvd.allreduce(tf.ones([]), op=hvd.Sum, name="afterwards")) == size


def test_wrong_uses_are_refused_by_name(rank, size):
    variable, other = tf.Variable(tf.ones([3])), tf.Variable(tf.ones([4]))

    def tape_of(compression, wrap=hvd.DistributedGradientTape, target=variable, **arguments):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(target)
        return wrap(tape, compression=compression, **arguments).gradient(loss, [target])

    compression = hvd.Compression.topk(density=1.0)
    tape_of(compression)
    with pytest.raises(ArgumentError, match="average"):
        tape_of(compression, op=hvd.Sum)
    with pytest.raises(UnsupportedError, match="another compressor"):
        tape_of(compression, wrap=stock.DistributedGradientTape)
    with pytest.raises(UnsupportedError, match="Adasum"):
        tape_of(compression, op=hvd.Adasum)
    with pytest.raises(ArgumentError, match="made once"):
        tape_of("topk:density=1.0")
    with pytest.raises(UnsupportedError, match="jit_compile"):
        tf.function(lambda: tape_of(compression), jit_compile=True)()
    with pytest.raises(UnsupportedError, match="Adasum"):
        tape_of(hvd.Compression.topk(), wrap=stock.DistributedGradientTape, op=hvd.Adasum)
    with pytest.raises(UnsupportedError, match="something else"):
        hvd.allreduce(tf.ones([3]), compression=hvd.Compression.topk())
    dropped_in = hvd.Compression.topk(density=1.0)
    tape_of(dropped_in, wrap=stock.DistributedGradientTape)
    tape_of(dropped_in, wrap=stock.DistributedGradientTape, target=other)  # variables are known
    with pytest.raises(UnsupportedError, match="another compressor"):
        tape_of(dropped_in)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_rank_may_trace_again_alone(rank, size, wrapper, everywhere):
    """For a last batch of another length, say: what is traced runs nothing that the others do not."""
    compression, weight = hvd.Compression.topk(density=1.0), tf.Variable(tf.zeros([4]), name="weight")
    # rows that are always the same: stock Horovod itself waits with these
    table = tf.Variable(tf.zeros([6, 2]), name="table")
    variables = [weight, table][: 2 - (wrapper == "stock")]

    @tf.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * tf.range(1.0, 5.0)) + 0.0 * tf.reduce_sum(batch)
            loss += tf.reduce_sum(tf.gather(table, [1, 4]))
        tape = WRAPPERS[wrapper](tape, compression=compression)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(gradient)

    for length in (3, 3 + (rank == 0), 3):
        step(tf.ones([length]))
    assert step.experimental_get_tracing_count() == 1 + (rank == 0)
    assert (everywhere(weight.numpy()) == [-3.0, -6.0, -9.0, -12.0]).all()
    assert table.numpy()[:, 0].tolist() == ([0.0] * 6 if wrapper == "stock" else [0, -3.0, 0, 0, -3.0, 0])
