"""Carrying out the requests of a sparsifier with Horovod's native, asynchronous TensorFlow operations.

A request is made on the host, by a sparsifier, when the graph runs; its operation is in the graph
since it was traced. So everything that an operation fixes must follow from the kind of the request:
all kinds but the allreduce travel as int32 words, whatever they hold, and a broadcast, whose root
changes from step to step while an operation's is fixed, is an allgather to which the root alone gives
something (the same bytes).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    ReduceScatter,
    Request,
)
from horovod_sparse.errors import CollectiveMismatchError, UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.tensors import divided_by_ranks

#: What goes through an operation: the buffer, and how many elements of it go to (come from) each rank;
#: the latter is empty where the kind needs no such thing.
Wire = tuple[np.ndarray, np.ndarray]

#: one of the words by which `hvd.elastic.run` knows Horovod's failures
ELASTIC_WORD = "HorovodAllgather"

NO_SPLITS = np.empty(0, np.int32)
_NOTHING = np.empty(0, np.int32)


def known_to_elastic() -> Any:
    """A context in which operations get names by which ``hvd.elastic.run`` knows Horovod's failures.

    It looks for "HorovodAllreduce", "HorovodAllgather" or "HorovodBroadcast" in the error's text, where a
    graph quotes the operation's name and not its type; a failure that it does not know ends the training as
    if it were done. Collectives keep their names: Horovod is told to ignore the scopes before them. All
    kinds are in one scope, the all-to-all, which it does not look for, too.

    Example:
        >>> @tf.function
        ... def named():
        ...     with tf.name_scope("outer"), known_to_elastic():
        ...         return tf.zeros([], name="bucket.0")
        >>> [operation.name for operation in named.get_concrete_function().graph.get_operations()][0]
        'HorovodAllgather/bucket.0'
    """
    # the slash: no numbers are added to it, but to the names within, as if there were no scope
    return tf.name_scope(f"{ELASTIC_WORD}/")


def not_folded(gradient: Any) -> Any:
    """A gradient as an operation of Horovod's has to get it in a graph: not as a constant.

    To TensorFlow these operations are pure, so one whose input is a constant (the gradient of a sum is) is
    carried out once, when the graph is optimized, and its result kept, also for another number of ranks. If
    one rank alone traces again, it waits for the others then, which do not.
    """
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = not_folded(gradient.values), not_folded(gradient.indices)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    if tf.executing_eagerly():
        return gradient
    one = tf.minimum(hvd.size_op(), 1)  # which nobody knows before the graph runs
    if gradient.shape.rank == 0:
        return gradient * tf.cast(one, gradient.dtype)
    # all of it: where that begins is known only then. Nothing is copied. A shape of that kind would not do:
    # a vector's follows from its number of elements
    same = tf.slice(gradient, tf.fill([tf.rank(gradient)], one - 1), tf.fill([tf.rank(gradient)], -1))
    same.set_shape(gradient.shape)
    return same


def wire_dtype(kind: type[Request], value_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that a request of this kind has in the graph."""
    return np.dtype(value_dtype if kind in (AllReduce, ReduceScatter) else np.int32)


def nothing(kind: type[Request], value_dtype: np.dtype[Any], size: int) -> Wire:
    """What a rank sends that has failed: empty messages, so that no rank waits, and each one notices."""
    splits = np.zeros(size, np.int32) if kind in (Exchange, AllToAll) else NO_SPLITS
    return np.empty(0, wire_dtype(kind, value_dtype)), splits


def to_wire(request: Request, value_dtype: np.dtype[Any], place: tuple[int, int]) -> Wire:
    """A request as its operation takes it."""
    rank, size = place
    if isinstance(request, AllGather):
        return np.ascontiguousarray(request.buffer, np.int32), NO_SPLITS
    if isinstance(request, (AllReduce, ReduceScatter)):
        if request.buffer.dtype != value_dtype:
            raise CollectiveMismatchError(
                f"a sum of {request.buffer.dtype} in a bucket of {value_dtype}: in a graph its type "
                "is fixed, and is that of the accumulator"
            )
        return np.ascontiguousarray(request.buffer), NO_SPLITS
    if isinstance(request, Broadcast):
        if request.buffer.nbytes % 4:
            raise UnsupportedError(f"a broadcast of {request.buffer.dtype}, which are not whole words")
        words = np.ascontiguousarray(request.buffer).view(np.int32)
        return (words if request.root == rank else _NOTHING), NO_SPLITS
    if isinstance(request, AllToAll):
        buffers = list(request.buffers)
    else:  # Horovod has no send: an all-to-all in which most messages are empty
        buffers = [request.sends.get(peer, _NOTHING) for peer in range(size)]
    splits = np.array([buffer.size for buffer in buffers], np.int32)
    return np.concatenate(buffers).astype(np.int32, copy=False), splits


def from_wire(request: Request, output: np.ndarray, splits: np.ndarray) -> Any:
    """What comes back for a request."""
    if isinstance(request, (AllReduce, ReduceScatter, AllGather)):
        return output
    if isinstance(request, Broadcast):
        if output.nbytes != request.buffer.nbytes:
            raise CollectiveMismatchError(
                f"a broadcast of {request.buffer.nbytes} bytes brought {output.nbytes}: the ranks do not "
                "agree who sends, or the root has failed"
            )
        return output.view(request.buffer.dtype)
    messages = np.split(output, np.cumsum(splits)[:-1])
    if isinstance(request, AllToAll):
        return messages
    strangers = [
        peer for peer, message in enumerate(messages) if message.size and peer not in request.sources
    ]
    if strangers:
        raise CollectiveMismatchError(
            f"messages are awaited from {sorted(request.sources)}, but {strangers} sent, too"
        )
    return {peer: messages[peer] for peer in request.sources}


def carry_out(
    kind: type[Request], buffer: tf.Tensor, splits: tf.Tensor | None, name: str, process_set: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """The operation for a round. Asynchronous: no thread waits for it."""
    common = {"name": name, "ignore_name_scope": True, "process_set": process_set}
    with known_to_elastic():
        if kind is AllReduce:
            return hvd.allreduce(buffer, op=hvd.Sum, **common), tf.zeros([0], tf.int32)
        if kind is ReduceScatter:
            return hvd.reducescatter(buffer, op=hvd.Sum, **common), tf.zeros([0], tf.int32)
        if kind in (Exchange, AllToAll):
            output, received = hvd.alltoall(buffer, splits=splits, **common)
            return output, received
        return hvd.allgather(buffer, **common), tf.zeros([0], tf.int32)


def reduce_densely(gradient: Any, name: str, process_set: Any, average: bool) -> Any:
    """The sum or average over ranks, of the kind of the gradient."""
    if gradient.dtype.is_complex:
        raise UnsupportedError(
            f"a gradient of {gradient.dtype.name}: Horovod sums real numbers. Keep real and imaginary parts "
            "as variables of their own, or the variable local (register_local_source)"
        )
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
