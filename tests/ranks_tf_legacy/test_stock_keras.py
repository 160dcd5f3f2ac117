"""Stock Horovod's Keras optimizers (tf-keras) with a sparsifier as `compression=`."""

from __future__ import annotations

import horovod.tensorflow as stock
import horovod.tensorflow.keras as stock_keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import horovod_sparse.tensorflow as hvd

pytestmark = pytest.mark.tensorflow


def _fitted(compression, legacy, eager, **arguments):
    tf_keras.utils.set_random_seed(1)
    model = tf_keras.Sequential(
        [tf_keras.layers.Dense(8, activation="relu", input_shape=(6,)), tf_keras.layers.Dense(2)]
    )
    kinds = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
    optimizer = stock_keras.DistributedOptimizer(kinds.SGD(0.125), compression=compression, **arguments)
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, run_eagerly=eager)
    generator = np.random.default_rng(stock.rank())
    images = generator.standard_normal((24, 6)).astype(np.float32)
    labels = (images.sum(1) > 0).astype(np.int32)
    model.fit(images, labels, batch_size=4, epochs=1, shuffle=False, verbose=0)
    return np.concatenate([weight.reshape(-1) for weight in model.get_weights()])


@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
@pytest.mark.parametrize(
    ("eager", "arguments"),
    [
        (False, {}),
        (True, {}),
        (False, {"backward_passes_per_step": 2, "average_aggregated_gradients": True}),
        (False, {"groups": 2}),
        (False, {"op": hvd.Sum}),
    ],
    ids=["graph", "eager", "two passes", "groups", "sum"],
)
def test_density_1_is_dense_and_replicas_agree(legacy, eager, arguments):
    dense = _fitted(stock.Compression.none, legacy, eager, **arguments)
    compression = hvd.Compression.exdyna(density=1.0)
    assert np.allclose(_fitted(compression, legacy, eager, **arguments), dense, rtol=0, atol=1e-6)
    steps = 6 // arguments.get("backward_passes_per_step", 1)
    assert compression.telemetry.num_steps == steps

    sparse = _fitted(hvd.Compression.exdyna(density=0.2), legacy, eager, **arguments)
    everyone = stock.allgather(tf.constant(sparse[None]), name="stock_keras").numpy()
    assert (everyone == everyone[0]).all()
    assert not np.allclose(sparse, dense)
