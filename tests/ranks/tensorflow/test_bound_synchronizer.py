"""A compressor bound by hand: what its state does from step to step, in one trace."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.merging import Plan

pytestmark = pytest.mark.tensorflow


def test_dense_variables_train_with_momentum(rank, size):
    """A plan's dense ones: what momentum SGD does with the sum over ranks, in a graph."""
    text = "topk:density=0.1,feedback=momentum(momentum=0.5)"
    shapes = {"bias": (7,), "weight": (40, 3), "scale": (5,)}
    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]
    plan = Plan((("weight",),), ("bias", "scale"))
    compression = hvd.Compression.parse(text)
    synchronizer = compression.bind(average=False, plan=plan)
    synchronize = tf.function(lambda *given: synchronizer.synchronize(given, variables))
    velocity = {name: np.zeros(shapes[name]) for name in ("bias", "scale")}
    for step in range(4):
        everyone = [
            [(generator.integers(-64, 65, shape) / 64).astype(np.float32) for shape in shapes.values()]
            for generator in (np.random.default_rng([step, r]) for r in range(size))
        ]
        sums = dict(zip(shapes, synchronize(*map(tf.constant, everyone[rank])), strict=True))
        for i, name in enumerate(shapes):
            if name in velocity:
                velocity[name] = 0.5 * velocity[name] + sum(gradients[i] for gradients in everyone)
                np.testing.assert_array_equal(sums[name].numpy(), velocity[name].astype(np.float32))
    assert compression.synchronizer.plan == plan
    held = compression.state_dict()
    assert sorted(held["companions"][0]) == sorted(shapes) and not held["residuals"]["bias"].any()


def test_a_loop_in_a_graph_synchronizes_every_pass(rank, size):
    variable = tf.Variable(tf.zeros([64]))
    compression = hvd.Compression.exdyna(density=0.25)
    synchronizer = compression.bind(process_set=hvd.global_process_set, average=False)

    @tf.function
    def loop(count):
        for i in tf.range(count):
            gradient = tf.fill([64], tf.cast(i + 1, tf.float32))
            variable.assign_add(synchronizer.synchronize([gradient], [variable])[0])

    loop(tf.constant(5))
    assert synchronizer.step == 5
    part = synchronizer.sparse[0]
    mean = hvd.allreduce(tf.constant(part.bucket.accumulator.values()), op=hvd.Sum, name="held").numpy()
    assert np.array_equal(variable.numpy() + mean, np.full(64, 15.0 * size, np.float32)), "law 1"


def test_the_same_bucket_twice_in_one_graph_is_done_in_order(rank, size):
    variable = tf.Variable(tf.zeros([64]))
    compression = hvd.Compression.topk(density=1.0)
    synchronizer = compression.bind(process_set=hvd.global_process_set, average=False)

    @tf.function
    def twice(first, second):
        return [synchronizer.synchronize([gradient], [variable])[0] for gradient in (first, second)]

    for _ in range(3):
        first, second = twice(tf.ones([64]), tf.fill([64], 2.0))
        assert first.numpy()[0] == size and second.numpy()[0] == 2 * size
    assert synchronizer.step == 6
