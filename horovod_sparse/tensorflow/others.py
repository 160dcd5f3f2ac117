"""Gradients that no sparsifier takes: slices, integers, gradients without elements; as Horovod does it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.collectives import known_to_elastic, not_folded
from horovod_sparse.tensorflow.local import divided_by_ranks

__all__ = ["reduce_densely"]


def reduce_densely(gradient: Any, name: str, process_set: Any, average: bool) -> Any:
    """The sum or average over ranks, of the kind of the gradient.

    Args:
        gradient: a tensor, or `tf.IndexedSlices`: those of all ranks come one behind the other then, by
            two allgathers, as in `hvd.allreduce`.
        name: of the collectives.
        process_set: the ranks that take part.
        average: whether values are divided by the number of ranks.
    """
    common = {"ignore_name_scope": True, "process_set": process_set}
    gradient = not_folded(gradient)
    with known_to_elastic():
        if not isinstance(gradient, tf.IndexedSlices):
            return hvd.allreduce(gradient, op=hvd.Average if average else hvd.Sum, name=name, **common)
        values = hvd.allgather(gradient.values, name=f"{name}.values", **common)
        indices = hvd.allgather(gradient.indices, name=f"{name}.indices", **common)
    if average:
        values = divided_by_ranks(values, process_set)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
