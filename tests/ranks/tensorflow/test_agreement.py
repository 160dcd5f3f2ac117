"""Ranks that were given different things, or come apart: named on all of them, by tapes and by Keras."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from horovod_sparse.cli.main import main
from horovod_sparse.errors import DriftError
from support.keras_models import keras

pytestmark = pytest.mark.tensorflow

TEXT = "topk:density=0.1"


def refused(step: Any, words: str) -> None:
    with pytest.raises(Exception, match=words):
        step()


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"compression": "none"}, r"compression differs: .* none"),
        ({"backward_passes_per_step": 2}, "backward_passes_per_step differs"),
    ],
)
def test_optimizers_of_keras_given_different_things_are_told(rank, size, last, words):
    arguments = {"compression": TEXT, **(last if rank == size - 1 else {})}
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), **arguments)
    variable = keras.Variable([1.0] * 30)
    optimizer.build([variable])

    def step() -> None:
        for _ in range(arguments.get("backward_passes_per_step", 1)):
            optimizer.apply([tf.ones(30)])

    refused(step, words)


def test_keras_optimizers_that_are_set_differently(rank, size):
    sgd = keras.optimizers.SGD(0.1, momentum=0.9 if rank == size - 1 else 0.5)
    optimizer, variable = hvd_keras.DistributedOptimizer(sgd, compression=TEXT), keras.Variable([1.0] * 30)
    refused(lambda: optimizer.apply([tf.ones(30)], [variable]), r"momentum differs: ranks \[.*\] have 0.5")


def test_keras_compares_weights_and_the_optimizers_variables(rank, size):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(1)])
    compression = hvd_keras.Compression.topk(density=0.2)
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.Adam(0.05), compression=compression, check_every=3
    )
    model.compile(loss="mse", optimizer=optimizer, jit_compile=False)
    generator = np.random.default_rng(rank)
    data = generator.normal(size=(24, 6)), generator.normal(size=(24, 1))
    model.fit(*data, batch_size=8, verbose=0)
    if rank == size - 1:
        optimizer._momentums[2].assign(optimizer._momentums[2] + 1.0)
    with pytest.raises(tf.errors.OpError, match=r"DriftError.*variable . of the optimizer differs"):
        model.fit(*data, batch_size=8, verbose=0)


def test_what_differs_from_the_beginning_is_found_in_the_second_step(rank):
    weight, compression = tf.Variable(tf.fill([4], float(rank))), hvd.Compression.topk(density=0.5)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        weight.assign_sub(tape.gradient(loss, [weight])[0])

    step()
    with pytest.raises(DriftError, match="after step 1 "):
        step()
    same = tf.Variable(tf.ones([4]))
    sgd = keras.optimizers.SGD(0.1 * (1 + rank))
    optimizer = hvd_keras.DistributedOptimizer(sgd, compression="topk:density=0.5")
    optimizer.apply([tf.zeros([4])], [same])
    with pytest.raises(DriftError, match="of the optimizer differs"):
        optimizer.apply([tf.zeros([4])], [same])


def test_doctor_looks_at_tensorflow(capsys, rank):
    assert main(["doctor", "--framework", "tensorflow"]) in (0, 1)
    if rank == 0:
        assert "started by horovod, controller" in capsys.readouterr().out
