"""Keras 3: scales of a loss, and the policies that compute in half types."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from support.keras_models import fit, flat, keras, make_model

EVERYTHING, SPARSE = "topk:density=1.0", "topk:density=0.1"


@pytest.fixture
def policy():
    yield keras.mixed_precision.set_dtype_policy
    keras.mixed_precision.set_dtype_policy("float32")


def residual(optimizer):
    return np.concatenate([item.reshape(-1) for item in optimizer.state_dict()["residuals"].values()])


def scaled(initial_scale, compression, **steps):
    sgd = keras.optimizers.SGD(0.125)
    scaler = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=initial_scale, **steps)
    return hvd.DistributedOptimizer(scaler, compression=compression)


def test_residuals_do_not_know_the_scale(rank, size):
    """Which doubles every third step: what was kept under another scale counts as it was."""
    plain, optimizer = (
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.125), compression=SPARSE),
        scaled(8.0, SPARSE, dynamic_growth_steps=3),
    )
    expected, model = make_model(), make_model()
    fit(expected, plain, rank, size, epochs=1)
    fit(model, optimizer, rank, size, epochs=1)
    assert float(optimizer.dynamic_scale.numpy()) > 8.0
    assert residual(plain).any()
    np.testing.assert_allclose(flat(model), flat(expected), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(residual(optimizer), residual(plain), rtol=1e-5, atol=1e-7)


def test_three_overflows_end_as_in_dense_training(rank, size):
    """Of one rank alone, and in the first step: all ranks skip, at density 1 nothing is different then."""
    results = []
    for distributed in (True, False):
        weight = keras.Variable(np.ones(4, np.float32))
        sgd = keras.optimizers.SGD(0.125, momentum=0.5)
        optimizer = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=64.0, dynamic_growth_steps=2)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, compression=EVERYTHING)
        optimizer.build([weight])
        for number in range(8):
            everyone = [np.arange(4, dtype=np.float32) - 2 * one + number for one in range(size)]
            gradient = (everyone[rank] if distributed else np.mean(everyone, axis=0)) * float(
                optimizer.dynamic_scale.numpy()
            )
            if number in (0, 3, 6) and (rank == size - 1 or not distributed):
                gradient[1] = np.inf
            optimizer.apply([tf.constant(gradient)], [weight])
        results.append([*weight.numpy(), float(optimizer.dynamic_scale.numpy())])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


@pytest.mark.nightly
def test_float16_begins_with_a_scale_that_is_too_large(policy, rank, size, everywhere):
    """All ranks halve it together until a step is taken: as often as in dense training."""
    policy("mixed_float16")
    weights, scales = [], []
    for compression in ("none", EVERYTHING):
        optimizer, model = scaled(2.0**18, compression), make_model()
        fit(model, optimizer, rank, size, epochs=1)
        weights.append(flat(model))
        scales.append(float(optimizer.dynamic_scale.numpy()))
    assert scales[0] == scales[1] < 2.0**18
    assert 0 < optimizer.telemetry.num_steps < 6
    np.testing.assert_allclose(weights[1], weights[0], rtol=2e-3, atol=1e-5)
    assert (weights[1] != flat(make_model())).any()
    assert (everywhere(weights[1]) == weights[1]).all()


@pytest.mark.parametrize("run_eagerly", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_float16_overflows_on_one_rank(policy, run_eagerly, rank, size, everywhere):
    """No weight and no residual moves, on any rank, and the scale is halved on every one."""
    policy("mixed_float16")
    optimizer, model = scaled(256.0, SPARSE), make_model()
    model.compile(optimizer, loss="mse", run_eagerly=run_eagerly, jit_compile=False)
    images, labels = np.ones((4, 8), np.float32), np.ones((4, 3), np.float32)
    model.train_on_batch(images, labels)
    before, held, counted = flat(model), residual(optimizer), int(optimizer.iterations)
    assert held.any()
    model.train_on_batch(images, labels * (1e8 if rank == size - 1 else 1.0))
    np.testing.assert_array_equal(flat(model), before)
    np.testing.assert_array_equal(residual(optimizer), held)
    assert float(optimizer.dynamic_scale.numpy()) == 128.0
    model.train_on_batch(images, labels)
    assert int(optimizer.iterations) >= counted + 1
    assert (flat(model) != before).any()
    assert (everywhere(flat(model)) == flat(model)).all()
