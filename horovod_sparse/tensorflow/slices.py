"""Gradients that are `tf.IndexedSlices` already: Horovod's own way of summing them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_sparse.tensorflow._horovod import hvd

__all__ = ["gather_slices"]


def gather_slices(gradient: tf.IndexedSlices, name: str, process_set: Any, average: bool) -> tf.IndexedSlices:
    """The slices of all ranks, one behind the other: two allgathers, as in `hvd.allreduce`.

    Args:
        gradient: of this rank.
        name: of the collectives.
        process_set: the ranks that take part.
        average: whether values are divided by the number of ranks.
    """
    common = {"ignore_name_scope": True, "process_set": process_set}
    values = hvd.allgather(gradient.values, name=f"{name}.values", **common)
    indices = hvd.allgather(gradient.indices, name=f"{name}.indices", **common)
    if average:
        values = values / tf.cast(process_set.size(), values.dtype)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
