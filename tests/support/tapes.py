"""Tapes of ours and of stock Horovod, descending along given gradients."""

from __future__ import annotations

import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.errors import NonFiniteGradientError

SHAPES = [(7, 5), (40,), (3, 4, 5), ()]
WRAPPERS = {"ours": hvd.DistributedGradientTape, "stock": stock.DistributedGradientTape}


def random_gradients(rank, steps=3):
    generator = np.random.default_rng(rank)
    return [
        [(generator.integers(-64, 65, shape) / 64).astype(np.float32) for shape in SHAPES]
        for _ in range(steps)
    ]


def train(wrap, compression, graph, gradients, *, catch=(), **arguments):
    """Descends along given gradients; the variables after every step, one behind the other."""
    variables = [tf.Variable(tf.ones(shape), name=f"weight{i}") for i, shape in enumerate(SHAPES)]
    if isinstance(arguments.get("groups"), list):
        arguments["groups"] = [[variables[i] for i in group] for group in arguments["groups"]]

    def step(given):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * x) for v, x in zip(variables, given, strict=True)])
        tape = wrap(tape, compression=compression, **arguments)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.25 * gradient)

    step, seen = (tf.function(step) if graph else step), []
    for number, given in enumerate(gradients):
        if number in catch:
            with pytest.raises((NonFiniteGradientError, tf.errors.OpError), match=r"NonFinite|not finite"):
                step([tf.constant(array) for array in given])
        else:
            step([tf.constant(array) for array in given])
        seen.append(np.concatenate([variable.numpy().reshape(-1) for variable in variables]))
    return np.stack(seen)
