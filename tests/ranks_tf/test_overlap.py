"""Collectives are under way while backward goes on, and those of several buckets together."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd

pytestmark = pytest.mark.tensorflow


def test_buckets_communicate_while_backward_goes_on(rank, size):
    """A part of backward that takes long on one rank comes after the first bucket's collectives."""
    early, late = tf.Variable(tf.ones([32])), tf.Variable(tf.ones([32]))
    synchronizer = hvd.Compression.exdyna(density=0.5).bind(bucket_bytes=1)

    def sleep(array):
        time.sleep(0.5)
        return array

    @tf.function
    def step(first, second):
        slow = tf.numpy_function(sleep, [second], tf.float32, stateful=False)
        slow.set_shape([32])
        return synchronizer.synchronize([first, slow], [early, late])

    for _ in range(2):
        step(tf.fill([32], 1.0 + rank), tf.ones([32]))
    by_name = {part.names[0]: part.task.legs for part in synchronizer.parts}
    quick, slow = (by_name[name] for name in synchronizer.names)
    # begin and end of: start, resume, resume. Both rounds are over before the other gradient is there.
    assert len(quick) == len(slow) == 3
    assert quick[-1][1] < slow[0][0]


def test_no_bucket_waits_for_another(rank, size):
    """Ranks whose gradients come in opposite orders neither hang nor wait for the last one."""
    variables = [tf.Variable(tf.ones([32])) for _ in range(4)]
    synchronizer = hvd.Compression.exdyna(density=0.5).bind(bucket_bytes=1, average=False)

    def delayed(seconds):
        def wait(array):
            time.sleep(seconds)
            return array

        return wait

    @tf.function
    def step(*gradients):
        order = range(4) if rank % 2 else reversed(range(4))
        delays = {i: 0.05 * place for place, i in enumerate(order)}
        late = []
        for i, gradient in enumerate(gradients):
            slow = tf.numpy_function(delayed(delays[i]), [gradient], tf.float32, stateful=False)
            slow.set_shape([32])
            late.append(slow)
        return synchronizer.synchronize(late, variables)

    for _ in range(4):
        sums = step(*[tf.fill([32], float(i + 1)) for i in range(4)])
    held = [part.bucket.accumulator.values() for part in synchronizer.sparse]
    assert all(np.isfinite(values).all() for values in held)
    assert synchronizer.step == 4
    assert len(sums) == 4
