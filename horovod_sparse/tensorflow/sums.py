"""A single tensor, sparsified, on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.arrays import GradientParts
from horovod_sparse.feedback import Bucket, Recipe
from horovod_sparse.kernels import apply_scaled_sum
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.training import allreduce as common


def prepared(
    array: np.ndarray, recipe: Recipe, name: str, place: tuple[int, int]
) -> tuple[np.ndarray, tuple[Bucket, Any, Callable[..., object]]]:
    """Returns an array for the sum, and the bucket, what it folds, and what writes the sum."""
    total = np.empty(array.shape, array.dtype)
    info = BucketInfo(name, array.size, *place, array.dtype.name)
    bucket = common.stateless_bucket(recipe, info)
    return total, (bucket, GradientParts([array]), partial(apply_scaled_sum, total))


def on_host(function: Callable[[np.ndarray], np.ndarray], tensor: tf.Tensor) -> tf.Tensor:
    """Runs a function of arrays, in a graph when the graph runs; refuses gradients through it."""

    @tf.custom_gradient
    def run(given: tf.Tensor) -> tuple[tf.Tensor, Any]:
        with tf.device("/cpu:0"):
            if tf.executing_eagerly():
                result = tf.convert_to_tensor(function(given.numpy()))
            else:
                result = tf.numpy_function(function, [given], given.dtype)
        return tf.ensure_shape(result, given.shape), lambda _: common.refuse_gradients(True)

    return run(tensor)


@tf.autograph.experimental.do_not_convert
def sparsified(tensor: tf.Tensor, recipe: Recipe, name: str) -> tf.Tensor:
    """Returns a tensor as one rank sends it; the very tensor if it is not finite, or has no elements."""

    def alone(array: np.ndarray) -> np.ndarray:
        if array.size == 0:
            return array
        total, work = prepared(array, recipe, name, (0, 1))
        return total if common.write_alone(*work) else array

    return on_host(alone, tensor)
