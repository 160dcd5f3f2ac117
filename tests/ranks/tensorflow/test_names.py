"""Names of collectives: the same on all ranks, whatever else one of them has made; never those of another."""

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from support.keras_models import fit, flat, keras, make_model

pytestmark = pytest.mark.tensorflow


def _optimizer(kind):
    if kind == "scaled":
        scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8)
        return hvd_keras.DistributedOptimizer(scaler, compression="topk:density=0.1")
    compression = "none" if kind == "dense" else "randomk:density=0.1"
    return hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)


@pytest.mark.parametrize(
    "kind", ["sparse", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("dense", "scaled"))]
)
def test_what_one_rank_makes_for_itself_is_its_own_matter(kind, rank, size, everywhere):
    """An optimizer, a compressor, and a model: Keras gives the layers of the next one other names."""
    if rank == 0:
        mine = make_model(), _optimizer(kind), hvd.Compression.topk(density=0.1)
        mine[1].build(mine[0].trainable_variables)
    model = make_model(seed=rank)
    broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, _optimizer(kind), rank, size, epochs=1, callbacks=[broadcast])
    assert (everywhere(flat(model)) == flat(model)).all()
    assert (flat(model) != flat(make_model(seed=0))).any()


def test_two_models_of_the_same_names_in_one_step(rank, size):
    models = [[tf.Variable(tf.ones([5]), name="w"), tf.Variable(tf.ones([]), name="b")] for _ in range(2)]
    compressions = [hvd.Compression.topk(density=1.0) for _ in models]

    @tf.function
    def step():
        gradients = []
        for factor, weights, compression in zip((1.0, 100.0), models, compressions, strict=True):
            with tf.GradientTape() as tape:
                loss = factor * (rank + 1) * (tf.reduce_sum(weights[0]) + weights[1])
            tape = hvd.DistributedGradientTape(tape, compression=compression, op=hvd.Sum)
            gradients.append(tape.gradient(loss, weights))
        return gradients

    total = size * (size + 1) / 2
    for _ in range(3):
        for factor, (kernel, bias) in zip((1.0, 100.0), step(), strict=True):
            np.testing.assert_allclose(kernel, [factor * total] * 5)
            np.testing.assert_allclose(bias, factor * total)
