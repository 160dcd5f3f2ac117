"""Ranks whose variables come apart: found and named; by tapes and Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
import horovod_sparse.tensorflow.keras as hvd_keras
from horovod_sparse.errors import DriftError

pytestmark = pytest.mark.tensorflow


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


def test_local_variables_are_each_ranks_own(rank, size):
    variables = [tf.Variable(tf.ones([8])), tf.Variable(tf.ones([5]))]
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        compression=hvd_keras.Compression.topk(density=0.5),
        check_every=1,
    )
    optimizer.build(variables)
    optimizer.register_local_var(variables[1])
    step = tf.function(lambda *given: optimizer.apply(list(given), variables))
    for number in range(4):
        step(tf.ones([8]), tf.fill([5], float(rank + number)))  # raises nothing
