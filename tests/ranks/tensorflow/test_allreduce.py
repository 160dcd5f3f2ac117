"""Tensors of TensorFlow that are summed sparsely, by our allreduce and by Horovod's with our compressor."""

# ruff: noqa: F403
import horovod.tensorflow as stock
import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from conformance.allreduce import *
from conformance.allreduce import Front
from horovod_sparse.errors import UnsupportedError

pytestmark = pytest.mark.controllers
TOP = hvd.Compression.topk(density=0.25)


def tensor_of(array: np.ndarray) -> tf.Tensor:
    half = array.dtype == np.uint16
    return tf.bitcast(tf.constant(array), tf.bfloat16) if half else tf.constant(array)


def array_of(tensor: tf.Tensor) -> np.ndarray:
    return (tf.bitcast(tensor, tf.uint16) if tensor.dtype == tf.bfloat16 else tensor).numpy()


FRONT = Front(stock, hvd, tensor_of, array_of, (lambda operation: operation, tf.function))


def test_a_graph_has_the_same_sum_twice_and_again(rank):
    graph = tf.function(lambda given: [hvd.allreduce(given, name="twice", compression=TOP) for _ in range(2)])
    sums = [*graph(tf.range(8.0) + rank), *graph(tf.range(8.0) + rank)]
    assert all((one.numpy() == sums[0].numpy()).all() for one in sums)


def test_graphs_name_what_differs_and_gradients_are_refused(rank, size):
    with pytest.raises(tf.errors.OpError, match=r"shape differs: .*ranks \[0\] have \[4\]"):
        tf.function(lambda given: hvd.allreduce(given, name="shapes", compression=TOP))(tf.ones([4 + rank]))
    for allreduce in (hvd.allreduce, stock.allreduce):
        variable = tf.Variable(tf.ones(4))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(allreduce(variable, name="gradient", compression=TOP))
        with pytest.raises(UnsupportedError, match="requires a gradient"):
            tape.gradient(loss, variable)
