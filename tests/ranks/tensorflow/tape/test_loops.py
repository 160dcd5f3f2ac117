"""Loops that users write: gradients computed twice to save memory, and two models that train each other."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.tensorflow.keras import DistributedOptimizer
from support.keras_models import keras

EVERYTHING = "topk:density=1.0"


def weights(count):
    drawn = np.random.default_rng(0)
    return [tf.Variable(drawn.normal(size=(6, 6), scale=0.4).astype(np.float32)) for _ in range(count)]


#: of the steps
GRAPH = [True, pytest.param(False, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("graph", GRAPH)
def test_recompute_grad(graph, rank, everywhere):
    """What is computed a second time in the backward pass is synchronized once, and is the same."""
    results = []
    for again in (False, True):
        variables, compression = weights(3), hvd.Compression.topk(density=0.2)

        def layer(x, weight):
            return tf.tanh(x @ weight)

        def loss_of(x, variables=variables, layer=layer, again=again):
            for weight in variables:
                own = lambda x, weight=weight: layer(x, weight)  # noqa: E731
                x = tf.recompute_grad(own)(x) if again else own(x)
            return tf.reduce_sum(x * x)

        def step(number, variables=variables, compression=compression, loss_of=loss_of):
            with tf.GradientTape() as local:
                loss = loss_of(tf.cos(tf.range(12.0) * (1.0 + rank) + number)[:, None] * tf.ones([1, 6]))
            tape = hvd.DistributedGradientTape(local, compression=compression)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.05 * gradient)

        taken = tf.function(step) if graph else step
        for number in range(4):
            taken(tf.constant(float(number)))
        assert compression.telemetry.num_steps == 4
        results.append(np.concatenate([variable.numpy().reshape(-1) for variable in variables]))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6, atol=1e-7)
    assert (everywhere(results[1]) == results[1]).all()


@pytest.mark.parametrize("graph", GRAPH)
def test_two_optimizers_train_two_models_in_turn(graph, rank, size, everywhere):
    """A generator against a critic: each by an optimizer of its own, one after the other in one step."""
    results = []
    for text in ("none", EVERYTHING):
        models = []
        for seed in (1, 2):
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
            drawn = np.random.default_rng(seed)
            for variable in model.trainable_weights:
                variable.assign(drawn.normal(size=variable.shape, scale=0.3))
            models.append(model)
        optimizers = [DistributedOptimizer(keras.optimizers.SGD(0.05), compression=text) for _ in models]

        def step(noise, real, models=models, optimizers=optimizers):
            makes, judges = models
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(judges(makes(noise))) - tf.reduce_mean(judges(real))
                loss += tf.reduce_mean(judges(real) ** 2)
            variables = judges.trainable_weights
            optimizers[1].apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            with tf.GradientTape() as tape:
                loss = -tf.reduce_mean(judges(makes(noise))) + tf.reduce_mean(makes(noise) ** 2)
            variables = makes.trainable_weights
            optimizers[0].apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        taken = tf.function(step) if graph else step
        drawn = np.random.default_rng(10 + rank)
        for _ in range(4):
            taken(*(tf.constant(drawn.normal(size=(5, 4)).astype(np.float32)) for _ in models))
        every = [item.numpy().reshape(-1) for model in models for item in model.trainable_weights]
        results.append(np.concatenate(every))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert (everywhere(results[1]) == results[1]).all()
    assert [optimizer.telemetry.num_steps for optimizer in optimizers] == [4, 4]
