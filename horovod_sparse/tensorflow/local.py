"""Gradients divided by the number of ranks; those of local variables are, which are not synchronized."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_sparse.tensorflow._horovod import hvd, is_elastic

__all__ = ["divided_by_ranks", "scaled_locally"]


def divided_by_ranks(tensor: tf.Tensor, process_set: Any) -> tf.Tensor:
    """A tensor divided by the number of ranks, which in elastic training is asked for in every step."""
    number = hvd.size_op(process_set_id=process_set.process_set_id) if is_elastic() else process_set.size()
    return tensor / tf.cast(number, tensor.dtype)


def scaled_locally(gradient: Any, process_set: Any) -> Any:
    """The gradient divided by the number of ranks, as the average of the others' losses would have it.

    Args:
        gradient: a tensor, `tf.IndexedSlices`, or None.
        process_set: the ranks, whether this one is among them or not.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = divided_by_ranks(gradient.values, process_set)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return divided_by_ranks(gradient, process_set)
