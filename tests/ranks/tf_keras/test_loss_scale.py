"""tf-keras scales the loss of mixed_float16 by an optimizer around ours, and skips what overflows."""

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd_tf
import horovod_sparse.tensorflow.keras as hvd
from conformance.keras import inner, scale_of, sgd
from horovod_sparse.errors import UnsupportedError
from support.keras_models import fit, flat, keras, make_model

SPARSE = "topk:density=0.05"


def test_a_scaler_may_be_wrapped_too(rank, size):
    plain = sgd("new", 0.125, 0.0)
    scaler = keras.mixed_precision.LossScaleOptimizer(plain, initial_scale=64, dynamic_growth_steps=5)
    wrapped, model, twin = hvd.DistributedOptimizer(scaler, compression=SPARSE), make_model(), make_model()
    fit(model, wrapped, rank, size, epochs=1)
    fit(twin, hvd.DistributedOptimizer(sgd("new", 0.125, 0.0), compression=SPARSE), rank, size, epochs=1)
    assert isinstance(wrapped, keras.mixed_precision.LossScaleOptimizer)
    assert (wrapped.initial_scale, wrapped.dynamic_growth_steps, scale_of(wrapped)) == (64, 5, 128)
    assert inner(wrapped).telemetry.num_steps == 6
    np.testing.assert_allclose(flat(model), flat(twin), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("arguments", "scale", "words"),
    [
        ({"backward_passes_per_step": 2}, {}, "backward_passes_per_step"),
        ({"merging": "optimal"}, {}, "profile"),
        ({}, {"dynamic": False, "initial_scale": 8.0}, "the other way round"),
    ],
)
def test_what_cannot_be_scaled_is_refused_in_the_first_step(arguments, scale, words):
    optimizer = hvd.DistributedOptimizer(sgd("new"), compression=SPARSE, **arguments)
    scaled, weight = keras.mixed_precision.LossScaleOptimizer(optimizer, **scale), tf.Variable(tf.ones([2]))
    step = tf.function(lambda: scaled.minimize(lambda: tf.reduce_sum(weight), [weight]), autograph=False)
    with pytest.raises(UnsupportedError, match=words):
        step()
    np.testing.assert_array_equal(weight.numpy(), 1.0)


@pytest.mark.parametrize("graph", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_tape_is_told_the_scale(graph, rank, size, everywhere):
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
