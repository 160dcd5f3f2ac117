"""A compressor bound by hand: what its state does from step to step, in one trace."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.merging import Plan

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize(
    "arguments",
    [
        {"plan": ["bias", "scale"]},
        pytest.param({"rules": "dense_below=10"}, marks=pytest.mark.nightly),
    ],
    ids=["plan", "rule"],
)
def test_dense_variables_train_with_momentum(rank, size, arguments):
    """A plan's dense ones and a rule's: what momentum SGD does with the sum over ranks, in a graph."""
    text = "topk:density=0.1,feedback=momentum(momentum=0.5)"
    shapes = {"bias": (7,), "weight": (40, 3), "scale": (5,)}
    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]
    plan = Plan((("weight",),), tuple(arguments["plan"])) if "plan" in arguments else None
    compression = hvd.Compression.parse(",".join([text, *([arguments["rules"]] if not plan else [])]))
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
    if plan is not None:
        assert compression.synchronizer.plan == plan
    held = compression.state_dict()
    assert sorted(held["companions"][0]) == sorted(shapes) and not held["residuals"]["bias"].any()


def test_partitions_of_a_graph_follow_the_gradients(rank, size):
    """Where gradients are large moves from one end to the other, and partitions with it, in one trace."""
    variable = tf.Variable(tf.zeros([4096]))
    synchronizer = hvd.Compression.exdyna(density=0.05, feedback="none").bind()
    synchronize = tf.function(lambda gradient: synchronizer.synchronize([gradient], [variable])[0])
    slope = np.linspace(1.0, 10.0, 4096, dtype=np.float32)
    noise = np.random.default_rng(rank).standard_normal(4096).astype(np.float32)
    firsts = []
    for where in (slope, slope[::-1]):
        for _ in range(8):
            synchronize(tf.constant(noise * where))
        firsts.append(int(synchronizer.sparse[0].bucket.state.partitions.num_blocks[0]))
    # the first part has small gradients and many elements, and then large ones and few
    assert firsts[0] > 2 * firsts[1]
    assert synchronize.experimental_get_tracing_count() == 1


def test_thresholds_of_a_graph_follow_the_gradients(rank, size):
    variable = tf.Variable(tf.zeros([400]))
    compression = hvd.Compression.micro(density=0.05, feedback="none")
    synchronizer = compression.bind(process_set=hvd.global_process_set)
    synchronize = tf.function(lambda gradient: synchronizer.synchronize([gradient], [variable])[0])
    base = np.random.default_rng(rank).standard_normal(400).astype(np.float32)
    thresholds = []
    for scale in (1.0, 100.0, 10_000.0):
        synchronize(tf.constant(scale * base))
        thresholds.append(synchronizer.sparse[0].bucket.last.facts["threshold"])
    assert thresholds[1] == pytest.approx(100 * thresholds[0], rel=0.2)
    assert thresholds[2] == pytest.approx(100 * thresholds[1], rel=0.2)
    assert synchronize.experimental_get_tracing_count() == 1


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


def test_results_that_are_kept_stay_what_they_are(rank, size):
    variable = tf.Variable(tf.zeros([64]))
    synchronizer = hvd.Compression.topk(density=1.0).bind(average=False)
    kept = [synchronizer.synchronize([tf.fill([64], float(i))], [variable])[0] for i in range(5)]
    assert [tensor.numpy()[3] for tensor in kept] == [i * size for i in range(5)]
