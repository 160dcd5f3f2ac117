"""tf-keras scales the loss of mixed_float16 by an optimizer around ours, and skips what overflows."""

from __future__ import annotations

import functools

import horovod.tensorflow.keras as stock
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd_tf
import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.errors import UnsupportedError
from support.keras_models import fit, flat, keras, make_model

KINDS = ["new", pytest.param("legacy", marks=pytest.mark.nightly)]
EVERYTHING, SPARSE = "topk:density=1.0", "topk:density=0.05"


@pytest.fixture
def mixed():
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy("float32")


def sgd(kind, rate=0.125):
    return (keras.optimizers if kind == "new" else keras.optimizers.legacy).SGD(rate)


def residual(optimizer):
    held = optimizer.state_dict()["residuals"].values()
    return np.concatenate([values.reshape(-1) for values in held])


@functools.cache
def unscaled():
    """Weights and residual of a training without a scale."""
    model, optimizer = make_model(), hvd.DistributedOptimizer(sgd("new"), compression=SPARSE)
    fit(model, optimizer, hvd.rank(), hvd.size(), epochs=1)
    held = residual(optimizer)
    assert held.any()
    return flat(model), held


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_is_skipped_as_in_horovod(mixed, kind, rank, size, everywhere):
    """The first scale is too large: all ranks halve it, and go on."""
    weights, scales = [], []
    for distributed in (stock, hvd):
        compression = {} if distributed is stock else {"compression": EVERYTHING}
        optimizer = distributed.DistributedOptimizer(sgd(kind), **compression)
        scaler = keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=2.0**18)
        model = make_model()
        fit(model, scaler, rank, size, epochs=1)
        weights.append(flat(model))
        scales.append(float(scaler.loss_scale))
    assert scales[0] == scales[1] < 2.0**18
    np.testing.assert_allclose(weights[1], weights[0], rtol=2e-3, atol=1e-5)
    assert (weights[1] != flat(make_model())).any()
    assert optimizer.telemetry.num_steps < 6
    assert (everywhere(weights[1]) == weights[1]).all()


@pytest.mark.parametrize("kind, run_eagerly", [("new", False), ("legacy", True)])
def test_an_overflow_of_one_rank_is_everybodys(kind, run_eagerly, rank, size, everywhere):
    """Weights stay, and so does the residual, without a trace of the bad gradient."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(kind), compression=SPARSE)
    scaler = keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=1024)
    model.compile(scaler, loss="mse", run_eagerly=run_eagerly)
    images, labels = np.ones((4, 8), np.float32), np.ones((4, 3), np.float32)
    model.train_on_batch(images, labels)
    before, held = flat(model), residual(optimizer)
    model.train_on_batch(images, labels if rank else labels * np.float32("inf"))
    np.testing.assert_array_equal(flat(model), before)
    np.testing.assert_array_equal(residual(optimizer), held)
    assert float(scaler.loss_scale) == 512
    model.train_on_batch(images, labels)
    assert (flat(model) != before).any()
    assert (everywhere(flat(model)) == flat(model)).all()


@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_residuals_do_not_know_the_scale(dynamic, rank, size):
    """Which doubles every third step, or is fixed: training is the same as without one."""
    model, optimizer = make_model(), hvd.DistributedOptimizer(sgd("new"), compression=SPARSE)
    steps = {"dynamic_growth_steps": 3} if dynamic else {}
    scaler = keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic, initial_scale=8.0, **steps)
    fit(model, scaler, rank, size, epochs=1)
    weights, held = unscaled()
    np.testing.assert_allclose(flat(model), weights, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(residual(optimizer), held, rtol=1e-5, atol=1e-7)
    assert float(scaler.loss_scale) == (32 if dynamic else 8)


def test_a_scaler_may_be_wrapped_too(rank, size):
    """As in Keras 3; the scaler comes out again, around what is distributed."""
    scaler = keras.mixed_precision.LossScaleOptimizer(sgd("new"), initial_scale=64, dynamic_growth_steps=5)
    wrapped, model = hvd.DistributedOptimizer(scaler, compression=SPARSE), make_model()
    fit(model, wrapped, rank, size, epochs=1)
    assert isinstance(wrapped, keras.mixed_precision.LossScaleOptimizer)
    assert (wrapped.initial_scale, wrapped.dynamic_growth_steps, float(wrapped.loss_scale)) == (64, 5, 128)
    assert wrapped.inner_optimizer.telemetry.num_steps == 6
    np.testing.assert_allclose(flat(model), unscaled()[0], rtol=1e-5, atol=1e-7)


def test_a_saved_scaler_is_loaded_with_its_scale(mixed, tmp_path, rank, size):
    path = str(tmp_path / f"{rank}.keras")
    model = make_model()
    fit(model, hvd.DistributedOptimizer(sgd("new"), compression=EVERYTHING), rank, size, epochs=1)
    model.save(path)
    again = hvd.load_model(path, compression=EVERYTHING)
    assert isinstance(again.optimizer, keras.mixed_precision.LossScaleOptimizer)
    fit(again, again.optimizer, rank, size, epochs=1)
    assert again.optimizer.inner_optimizer.telemetry.num_steps > 0


def test_what_cannot_be_scaled_is_refused_when_it_is_compiled():
    optimizer = hvd.DistributedOptimizer(sgd("new"), compression=SPARSE, backward_passes_per_step=2)
    with pytest.raises(UnsupportedError, match="backward_passes_per_step"):
        keras.mixed_precision.LossScaleOptimizer(optimizer)
    optimizer = hvd.DistributedOptimizer(sgd("new"), compression=SPARSE, merging="optimal")
    with pytest.raises(UnsupportedError, match="profile"):
        keras.mixed_precision.LossScaleOptimizer(optimizer)


def test_horovods_own_optimizer_cannot_tell_the_scale(rank, size):
    compression = hvd_tf.Compression.topk(density=0.05)
    optimizer = stock.DistributedOptimizer(sgd("new"), compression=compression)
    model = make_model()
    with pytest.raises(UnsupportedError, match=r"horovod_sparse.tensorflow.keras.DistributedOptimizer"):
        fit(model, keras.mixed_precision.LossScaleOptimizer(optimizer), rank, size)


@pytest.mark.parametrize("graph", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_tape_is_told_the_scale(graph, rank, size, everywhere):
    """Unscaled residuals, and NaN on all ranks where one overflows."""
    variable, compression = tf.Variable(tf.zeros(20)), hvd_tf.Compression.topk(density=0.1)
    scale, wanted = tf.Variable(4.0), tf.range(20.0)

    def step(factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * wanted * factor) * scale
        tape = hvd_tf.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, [variable], loss_scale=scale)[0]

    step = tf.function(step) if graph else step
    one = tf.constant(1.0)
    np.testing.assert_allclose(step(one)[-2:], [72.0, 76.0])
    scale.assign(8.0)
    bad = step(tf.constant(np.inf) if rank == 0 else one)
    assert np.isnan(bad).all()
    np.testing.assert_allclose(step(one)[-4:], [8 * 2 * 16, 8 * 2 * 17, 0, 0])
    held = next(iter(compression.state_dict()["residuals"].values()))
    np.testing.assert_allclose(held[-4:], [0, 0, 18, 19])
