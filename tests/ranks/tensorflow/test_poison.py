"""What is done where a gradient is not finite: `on_nonfinite` of tapes and Keras, eagerly and in graphs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from horovod_sparse.errors import ArgumentError

pytestmark = pytest.mark.tensorflow

BAD = 2


def trained(rank: int, size: int, data: Any, passes: int = 1, **arguments: Any) -> Any:
    """A small model after 5 batches of `fit`, one batch an epoch."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(1)])
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.Adam(0.05), backward_passes_per_step=passes, **arguments
    )
    model.compile(loss="mse", optimizer=optimizer, jit_compile=False, run_eagerly=False)
    seen = []
    for inputs, outputs in data:
        model.fit(inputs, outputs, batch_size=len(inputs), verbose=0)
        seen.append(np.concatenate([weight.reshape(-1) for weight in model.get_weights()]))
    return np.stack(seen), optimizer


def batches(rank: int, size: int) -> list[Any]:
    generator = np.random.default_rng(rank)
    data = [(generator.normal(size=(8, 6)), generator.normal(size=(8, 1))) for _ in range(5)]
    if rank == size - 1:
        data[BAD][0][1, 2] = np.inf
    return data


def test_keras_skips_a_step_and_does_not_count_it(rank, size, everywhere):
    compression = hvd_keras.Compression.topk(density=0.2)
    data = batches(rank, size)
    seen, optimizer = trained(rank, size, data, compression=compression, on_nonfinite="skip")
    assert np.array_equal(seen[BAD], seen[BAD - 1])
    assert not np.array_equal(seen[BAD + 1], seen[BAD])
    assert int(optimizer.iterations) == 4
    assert optimizer.telemetry.num_skipped == 1
    everyone = everywhere(seen)
    assert (everyone == everyone[0]).all()
    assert np.isfinite(everyone).all()


def test_a_wrong_policy_is_refused(rank):
    with pytest.raises(ArgumentError, match="'raise', 'skip' or 'zero'"):
        hvd.DistributedGradientTape(
            tf.GradientTape(), compression=hvd.Compression.topk(density=0.1), on_nonfinite="ignore"
        )
    with pytest.raises(ArgumentError, match="a sparsifier, or leave on_nonfinite out"):
        hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), on_nonfinite="skip")
