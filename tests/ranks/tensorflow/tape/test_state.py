"""What a compressor remembers for a tape goes through a checkpoint."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.sparsifiers.schedule import Exponential


def trained(variable, compression, steps, rank):
    """Steps of descent on this rank's own quadratic; gives the step for later."""

    @tf.function
    def step(number):
        with tf.GradientTape() as local:
            target = tf.cos(tf.range(64, dtype=tf.float32) * (1.0 + rank) + number)
            loss = tf.reduce_sum((variable - target) ** 2)
        tape = hvd.DistributedGradientTape(local, compression=compression)
        variable.assign_sub(0.1 * tape.gradient(loss, [variable])[0])

    for number in steps:
        step(tf.constant(float(number)))


def test_checkpoint_goes_on_bit_for_bit(tmp_path, rank):
    straight, made = tf.Variable(tf.zeros(64)), hvd.Compression.exdyna(density=0.1)
    trained(straight, made, range(12), rank)

    variable, first = tf.Variable(tf.zeros(64)), hvd.Compression.exdyna(density=0.1)
    trained(variable, first, range(6), rank)
    checkpoint = tf.train.Checkpoint(variable=variable, residuals=first.checkpointed())
    path = checkpoint.write(str(tmp_path / f"rank-{rank}"))

    again, second = tf.Variable(tf.ones(64)), hvd.Compression.exdyna(density=0.1)
    tf.train.Checkpoint(variable=again, residuals=second.checkpointed()).read(path).assert_consumed()
    trained(again, second, range(6, 12), rank)
    np.testing.assert_array_equal(again.numpy(), straight.numpy())
    (expected,) = made.state_dict()["residuals"].values()
    (residual,) = second.state_dict()["residuals"].values()
    np.testing.assert_array_equal(residual, expected)
    assert second.state_dict()["step"] == 12
    assert residual.any()


def test_schedules_go_on_where_sparsifiers_start_anew(rank):
    """Steps count the training, not the plan: the density falls on, and random-k's positions agree."""
    schedule = Exponential(steps=8, start=0.5)
    made = hvd.Compression.randomk(density=0.02, schedule=schedule)
    variable = tf.Variable(tf.zeros(64))
    trained(variable, made, range(4), rank)
    made.replan(made.plan)
    for step in (4, 5):
        trained(variable, made, [step], rank)
        assert made.telemetry.last.num_target == round(64 * schedule.density_at(step, 0.02))
    weights = hvd.allgather(variable[None]).numpy()
    assert (weights == weights[0]).all()
