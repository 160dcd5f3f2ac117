"""Gradients that are None in one step and not in another: each variable gets its own."""

import functools

import horovod.tensorflow as stock
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd

pytestmark = pytest.mark.tensorflow

#: of every variable; the same shape, so that a mix-up is not noticed by its shape
FACTORS = (1.0, 10.0, 100.0)


def _gradients(wrap, compression, variables, absent, graph, factor=1.0):
    def step():
        with tf.GradientTape() as tape:
            known = [i for i in range(len(variables)) if i not in absent]
            loss = tf.add_n([factor * FACTORS[i] * tf.reduce_sum(variables[i]) for i in known])
        tape = wrap(tape, compression=compression, op=hvd.Sum)
        return tape.gradient(loss, variables)

    return [None if g is None else g.numpy().tolist() for g in (tf.function(step) if graph else step)()]


#: of the steps
GRAPH = [pytest.param(False, id="eager", marks=pytest.mark.nightly), pytest.param(True, id="graph")]


@pytest.mark.parametrize(("bucket_bytes", "graph"), [(None, False), (1, True), ("stock", True)])
def test_a_tape_gives_every_variable_its_own(rank, size, bucket_bytes, graph):
    """Zeros, where all is sent, for a variable that had a gradient before."""
    variables = [tf.Variable(tf.ones([2]), name=f"w{i}") for i in range(3)]
    compression, full = hvd.Compression.topk(density=1.0), [[size * factor] * 2 for factor in FACTORS]
    wrap = functools.partial(hvd.DistributedGradientTape, bucket_bytes=bucket_bytes)
    if bucket_bytes == "stock":
        wrap = stock.DistributedGradientTape
    for absent in ((), {1}, {0, 2}, {0, 1}, ()):
        expected = [[0.0] * 2 if i in absent else full[i] for i in range(3)]
        assert _gradients(wrap, compression, variables, absent, graph) == expected


@pytest.mark.parametrize("graph", GRAPH)
@pytest.mark.parametrize("wrapper", ["ours", "stock"])
def test_a_variable_is_asked_for_twice(rank, size, graph, wrapper):
    wrap = {"ours": hvd.DistributedGradientTape, "stock": stock.DistributedGradientTape}[wrapper]
    first, second = (tf.Variable(tf.ones([2]), name=name) for name in ("first", "second"))
    compression = hvd.Compression.topk(density=1.0)

    def step():
        with tf.GradientTape() as tape:
            loss = (rank + 1.0) * tf.reduce_sum(first + 10.0 * second)
        return wrap(tape, compression=compression, op=hvd.Sum).gradient(loss, [first, second, first])

    total = size * (size + 1) / 2
    run = tf.function(step) if graph else step
    for _ in range(2):
        gradients = run()
        assert [float(gradient[0]) for gradient in gradients] == [total, 10 * total, total]
