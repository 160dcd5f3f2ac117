"""Stock Horovod's Keras optimizers (tf-keras) with a sparsifier as `compression=`."""

from __future__ import annotations

import functools

import horovod.tensorflow as stock
import horovod.tensorflow.keras as stock_keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import horovod_sparse.tensorflow as hvd
from horovod_sparse.errors import ArgumentError

pytestmark = pytest.mark.tensorflow


def _model():
    tf_keras.utils.set_random_seed(1)
    return tf_keras.Sequential(
        [tf_keras.layers.Dense(8, activation="relu", input_shape=(6,)), tf_keras.layers.Dense(2)]
    )


def _samples():
    generator = np.random.default_rng(stock.rank())
    images = generator.standard_normal((24, 6)).astype(np.float32)
    return images, (images.sum(1) > 0).astype(np.int32)


def _flat(model):
    return np.concatenate([weight.reshape(-1) for weight in model.get_weights()])


def _fitted(compression, legacy, eager, **arguments):
    model, (images, labels) = _model(), _samples()
    kinds = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
    momentum = arguments.pop("momentum", 0.0)
    plain = kinds.SGD(0.125, momentum=momentum)
    optimizer = stock_keras.DistributedOptimizer(plain, compression=compression, **arguments)
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, run_eagerly=eager)
    model.fit(images, labels, batch_size=4, epochs=1, shuffle=False, verbose=0)
    return _flat(model)


@functools.cache
def _descended(factor, passes):
    """What it must come to, by hand: `fit` takes seconds to trace.

    Args:
        factor: of the average of all ranks' gradients.
        passes: whose gradients are averaged for a step.
    """
    model, (images, labels) = _model(), _samples()
    loss, weights = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True), model.trainable_weights
    for start in range(0, len(labels), 4 * passes):
        chosen = slice(start, start + 4 * passes)  # batches are full: their mean is that of the passes
        with tf.GradientTape() as tape:
            value = loss(labels[chosen], model(images[chosen]))
        gradients = stock.grouped_allreduce(tape.gradient(value, weights), name="by_hand")
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.125 * factor * gradient)
    return _flat(model)


NIGHT = pytest.mark.nightly
PASSES = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}


@pytest.mark.parametrize(
    ("eager", "arguments", "legacy"),
    [
        (False, PASSES, True),
        (False, {"groups": 2}, True),
        (False, {"op": hvd.Sum}, False),
        pytest.param(True, {}, False, marks=NIGHT),
        pytest.param(True, {}, True, marks=NIGHT),
    ],
)
def test_density_1_is_dense(legacy, eager, arguments):
    passes = arguments.get("backward_passes_per_step", 1)
    dense = _descended(stock.size() if "op" in arguments else 1, passes)
    compression = hvd.Compression.exdyna(density=1.0)
    assert np.allclose(_fitted(compression, legacy, eager, **arguments), dense, rtol=0, atol=1e-6)
    assert compression.telemetry.num_steps == 6 // passes


@pytest.mark.parametrize(
    ("legacy", "eager"), [(True, False), *(pytest.param(kind, True, marks=NIGHT) for kind in (False, True))]
)
def test_sparse_replicas_agree(legacy, eager):
    compression = hvd.Compression.exdyna(density=0.2)
    sparse = _fitted(compression, legacy, eager)
    everyone = stock.allgather(tf.constant(sparse[None]), name="stock_keras").numpy()
    assert (everyone == everyone[0]).all()
    assert not np.allclose(sparse, _descended(1, 1))
    assert compression.telemetry.num_steps == 6


@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
def test_momentum_twice_is_refused(legacy):
    compression = hvd.Compression.parse("dgc:density=0.2,feedback=momentum")
    # AutoGraph puts what is raised within Horovod's functions into an error of its own, which quotes it
    with pytest.raises(Exception, match=r"momentum=0\.9.*momentum=0 to the optimizer") as caught:
        _fitted(compression, legacy, True, momentum=0.9)
    assert isinstance(caught.value, ArgumentError) or "ArgumentError: momentum" in str(caught.value)


@pytest.mark.parametrize("legacy", [False, pytest.param(True, marks=NIGHT)], ids=["new", "legacy"])
def test_a_layer_is_frozen_and_thawed_with_the_same_optimizer(legacy):
    results = []
    for compression in (stock.Compression.none, hvd.Compression.topk(density=1.0)):
        model, (images, labels) = _model(), _samples()
        kinds = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
        optimizer = stock_keras.DistributedOptimizer(kinds.SGD(0.125), compression=compression)
        if not legacy:
            optimizer.build(model.trainable_variables)
        for trains in (True, False, True):
            model.layers[0].trainable = trains
            model.compile(optimizer, loss=tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            model.fit(images, labels, batch_size=12, shuffle=False, verbose=0)
        results.append(_flat(model))
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=1e-6)
