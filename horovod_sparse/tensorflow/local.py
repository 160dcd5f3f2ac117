"""Gradients of local variables, which are not synchronized."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["scaled_locally"]


def scaled_locally(gradient: Any, size: int) -> Any:
    """The gradient divided by the number of ranks, as the average of the others' losses would have it.

    Args:
        gradient: a tensor, `tf.IndexedSlices`, or None.
        size: number of ranks.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)
