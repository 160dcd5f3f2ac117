"""TensorFlow's switch for looking into functions: with it on, training does what it does without."""

from __future__ import annotations

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd

pytestmark = pytest.mark.tensorflow

WRAPPERS = {"ours": hvd.DistributedGradientTape, "stock": stock.DistributedGradientTape}


def _descend(wrap, rank, *, op):
    weights = [tf.Variable(tf.ones([40]), name="a"), tf.Variable(tf.ones([3, 5]), name="b")]
    compression = hvd.Compression.exdyna(density=0.2)

    @tf.function
    def step(factor):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(factor * w * w) for w in weights])
        tape = wrap(tape, compression=compression, op=op)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.125 * gradient)

    for number in range(2):
        step(tf.linspace(1.0 + rank + number, 0.5, 40)[:1])
    return np.concatenate([weight.numpy().reshape(-1) for weight in weights])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_tape_trains_as_without_it(rank, size, wrapper):
    op = hvd.Sum if wrapper == "stock" else hvd.Average
    expected = _descend(WRAPPERS[wrapper], rank, op=op)
    tf.config.run_functions_eagerly(True)
    try:
        np.testing.assert_allclose(_descend(WRAPPERS[wrapper], rank, op=op), expected, rtol=1e-6)
    finally:
        tf.config.run_functions_eagerly(False)
