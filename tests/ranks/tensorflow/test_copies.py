"""Copies of optimizers are distributed; copies of models, and second derivatives, are refused by name."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from horovod_sparse.errors import UnsupportedError

pytestmark = pytest.mark.tensorflow

#: in a graph what is not so around it, and the other way round
_MIXED = [(False, True), (True, False)]
COPIES = {"pickle": lambda one: pickle.loads(pickle.dumps(one)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize(("made", "compression"), [("pickle", "topk:density=1.0"), ("deepcopy", "none")])
def test_a_copy_of_an_optimizer_is_distributed(rank, size, made, compression):
    optimizer = hvd_keras.DistributedOptimizer(
        tf.keras.optimizers.SGD(0.5), compression=compression, op=hvd.Sum
    )
    again = COPIES[made](optimizer)
    for one in (optimizer, again):
        weight = tf.Variable(tf.zeros([4]))
        one.build([weight])
        one.apply_gradients([(tf.fill([4], rank + 1.0), weight)])
        assert weight.numpy().tolist() == [-0.5 * size * (size + 1) / 2] * 4
    assert again.telemetry is not optimizer.telemetry


@pytest.mark.parametrize("made", COPIES)
def test_a_copy_of_a_model_would_not_be(rank, size, made, tmp_path):
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(4)])
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.5), compression="topk:density=0.5")
    model.compile(optimizer, "mse", jit_compile=False)
    with pytest.raises(UnsupportedError, match="clone_model"):
        COPIES[made](model)
    model.save(tmp_path / "model.keras")  # asks for the settings, too
    loaded = hvd_keras.load_model(tmp_path / "model.keras", compression="topk:density=0.5")
    assert hasattr(loaded.optimizer, "telemetry")


@pytest.mark.parametrize(
    ("inner", "outer"),
    [(False, False), (True, True), *(pytest.param(*one, marks=pytest.mark.nightly) for one in _MIXED)],
)
def test_a_gradient_of_a_synchronized_gradient_is_an_error(rank, size, inner, outer):
    """Where stock Horovod's has one, ours is not None. Nothing is raised where nobody asks."""
    weights = [tf.Variable(tf.ones([3])), tf.Variable(tf.ones([2]))]
    compression = hvd.Compression.topk(density=1.0)

    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(weight**2) for weight in weights])
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, weights)

    first = tf.function(gradients) if inner else gradients

    def second(asks):
        with tf.GradientTape(persistent=True) as tape:
            penalty = tf.add_n([tf.reduce_sum(gradient**2) for gradient in first()])
            other = tf.reduce_sum(weights[0] ** 3)
        return tape.gradient(penalty if asks else other, weights[0])

    run = tf.function(second) if outer else second
    assert run(False).numpy().tolist() == [3.0] * 3
    with pytest.raises((UnsupportedError, tf.errors.OpError), match="selected"):
        run(True)
    assert np.isfinite(run(False).numpy()).all()
