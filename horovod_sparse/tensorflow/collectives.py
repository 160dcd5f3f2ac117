"""Carries out requests with Horovod's native, asynchronous operations: in a graph, and eagerly to agree.

A request is made on the host, by a sparsifier, when the graph runs; its operation is in the graph
since it was traced. So everything that an operation fixes must follow from the kind of the request:
all kinds but the allreduce travel as int32 words, whatever they hold, and a broadcast, whose root
changes from step to step while an operation's is fixed, is an allgather to which the root alone gives
something (the same bytes).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse import collectives
from horovod_sparse.carriers import as_alltoall, inbox, run_over_hosts
from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.errors import CollectiveMismatchError, UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd, is_elastic
from horovod_sparse.tensorflow.waiting import Watch
from horovod_sparse.topology import RankAndSize, Topology
from horovod_sparse.training import engine
from horovod_sparse.training.agreement import next_label
from horovod_sparse.training.collective_errors import ConstructionErrors

#: What goes through an operation: the buffer, and how many elements of it go to (come from) each rank;
#: the latter is empty where the kind needs no such thing.
Wire = tuple[np.ndarray, np.ndarray]

#: a word by which `hvd.elastic.run` recognizes Horovod's failures
ELASTIC_WORD = "HorovodAllgather"

NO_SPLITS = np.empty(0, np.int32)
_NOTHING = np.empty(0, np.int32)


def known_to_elastic() -> Any:
    """Returns a name scope for Horovod's operations, by which ``hvd.elastic.run`` knows their failures."""
    # the slash: no numbers are added to it, but to the names within, as if there were no scope
    return tf.name_scope(f"{ELASTIC_WORD}/")


def hide_from_folding(gradient: Any) -> Any:
    """Returns a gradient that TensorFlow cannot fold as a constant: its collective would run only once."""
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = hide_from_folding(gradient.values), hide_from_folding(gradient.indices)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    if tf.executing_eagerly():
        return gradient
    one = tf.minimum(hvd.size_op(), 1)  # known only when the graph runs
    if gradient.shape.rank == 0:
        return gradient * tf.cast(one, gradient.dtype)
    # a slice of all: its start is known only then. Nothing is copied. An unknown shape would not do:
    # a vector's follows from its number of elements
    same = tf.slice(gradient, tf.fill([tf.rank(gradient)], one - 1), tf.fill([tf.rank(gradient)], -1))
    same.set_shape(gradient.shape)
    return same


def wire_dtype(kind: type[Request], value_dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(value_dtype if kind in (collectives.AllReduce, collectives.ReduceScatter) else np.int32)


def empty_messages(kind: type[Request], value_dtype: np.dtype[Any], size: int) -> Wire:
    """Returns the empty message that a rank sends whose step failed, so that other ranks do not wait."""
    splits = np.zeros(size, np.int32) if kind in (collectives.Exchange, collectives.AllToAll) else NO_SPLITS
    return np.empty(0, wire_dtype(kind, value_dtype)), splits


def to_wire(request: Request, value_dtype: np.dtype[Any], ranks: RankAndSize) -> Wire:
    rank, size = ranks
    if isinstance(request, collectives.AllGather):
        return np.ascontiguousarray(request.buffer, np.int32), NO_SPLITS
    if isinstance(request, (collectives.AllReduce, collectives.ReduceScatter)):
        if request.buffer.dtype != value_dtype:
            raise CollectiveMismatchError(
                f"an allreduce of {request.buffer.dtype} in a bucket of {value_dtype}: in TensorFlow a "
                "sparsifier must sum values of the bucket's dtype"
            )
        return np.ascontiguousarray(request.buffer), NO_SPLITS
    if isinstance(request, collectives.Broadcast):
        if request.buffer.nbytes % 4:
            raise UnsupportedError(f"a broadcast of {request.buffer.nbytes} bytes: give a multiple of 4")
        words = np.ascontiguousarray(request.buffer).view(np.int32)
        return (words if request.root == rank else _NOTHING), NO_SPLITS
    buffers = request.buffers if isinstance(request, collectives.AllToAll) else as_alltoall(request, size)
    splits = np.array([buffer.size for buffer in buffers], np.int32)
    return np.concatenate(buffers).astype(np.int32, copy=False), splits


def from_wire(request: Request, output: np.ndarray, splits: np.ndarray) -> Any:
    if isinstance(request, (collectives.AllReduce, collectives.ReduceScatter, collectives.AllGather)):
        return output
    if isinstance(request, collectives.Broadcast):
        if output.nbytes != request.buffer.nbytes:
            raise CollectiveMismatchError(
                f"a broadcast of {request.buffer.nbytes} bytes brought {output.nbytes}: the root failed, or "
                "ranks have different roots; all must use the same version, sparsifier and arguments"
            )
        return output.view(request.buffer.dtype)
    messages = np.split(output, np.cumsum(splits)[:-1])
    return messages if isinstance(request, collectives.AllToAll) else inbox(request, messages, "this rank")


def carry_out(
    kind: type[Request], buffer: tf.Tensor, splits: tf.Tensor, name: str, process_set: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Runs Horovod's operation for one collective, or builds it in a graph; returns output and splits."""
    common = {"name": name, "ignore_name_scope": True, "process_set": process_set}
    with known_to_elastic():
        if kind is collectives.AllReduce:
            return hvd.allreduce(buffer, op=hvd.Sum, **common), tf.zeros([0], tf.int32)
        if kind is collectives.ReduceScatter:
            return hvd.reducescatter(buffer, op=hvd.Sum, **common), tf.zeros([0], tf.int32)
        if kind in (collectives.Exchange, collectives.AllToAll):
            return tuple(hvd.alltoall(buffer, splits=splits, **common))
        return hvd.allgather(buffer, **common), tf.zeros([0], tf.int32)


def reduce_densely(gradient: Any, name: str, process_set: Any, average: bool, **options: Any) -> Any:
    """Sums or averages a gradient over ranks by Horovod's operations, without a sparsifier."""
    if gradient.dtype.is_complex:
        raise UnsupportedError(
            f"a gradient of {gradient.dtype.name}: Horovod sums real numbers. Keep real and imaginary parts "
            "as variables of their own"
        )
    common = {"ignore_name_scope": True, "process_set": process_set}
    gradient = hide_from_folding(gradient)
    with known_to_elastic():
        if not isinstance(gradient, tf.IndexedSlices):
            op = hvd.Average if average else hvd.Sum
            return hvd.allreduce(gradient, op=op, name=name, **common, **options)
        values = hvd.allgather(gradient.values, name=f"{name}.values", **common)
        indices = hvd.allgather(gradient.indices, name=f"{name}.indices", **common)
    if average:
        number = process_set.size()
        if is_elastic():  # an operation, since the number of ranks may change
            number = hvd.size_op(process_set_id=process_set.process_set_id)
        values /= tf.cast(number, values.dtype)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def nonfinite_marks(gradients: Sequence[Any], name: str, process_set: Any) -> tf.Tensor:
    """Gathers a mark for every gradient of every rank, rank after rank: 1 if it has NaN or Inf, else 0."""
    values = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]
    marks = tf.cast(tf.stack([tf.reduce_any(~tf.math.is_finite(one)) for one in values]), tf.int32)
    with tf.device("/cpu:0"):
        return carry_out(
            collectives.AllGather, hide_from_folding(marks), tf.zeros([0], tf.int32), name, process_set
        )[0]


# agreement of ranks: eagerly, also while a function is traced

#: publishes errors of optimizers, tapes and compressors
construction_errors = ConstructionErrors.of_horovod(hvd)

#: seconds between two checks while waiting
_LOOK_SECONDS = 0.1


def carry_out_together(
    coroutine: Synchronization[Any],
    process_set: Any,
    name: str,
    topology: Topology | None = None,
    *,
    looks: bool = False,
    watch: Watch | None = None,
    graphs: dict[Any, Any] | None = None,
) -> Any:
    """Runs a coroutine on all ranks, eagerly; with `looks`, raises if a rank failed to make its optimizer.

    Eager operations of one kind share a name in TensorFlow's cache, so two threads cannot run them at a time.
    A thread that gives `graphs`, a dictionary to keep, has operations of its own.
    """
    ranks = int(process_set.rank()), int(process_set.size())
    if topology is not None:
        coroutine = run_over_hosts(coroutine, topology, ranks[0])
    look = construction_errors.watcher(process_set) if looks else None

    def execute(request: Request) -> Any:
        kind = type(request)
        if ranks[1] == 1:
            return engine.answer_for_one_rank(request)
        value_dtype = getattr(request, "buffer", np.empty(0, np.float32)).dtype
        buffer, splits = to_wire(request, value_dtype, ranks)
        operation = f"{name}.{kind.__name__}"
        run = partial(carry_out, kind, buffer, splits, operation, process_set)
        if graphs is not None:
            key = operation, buffer.dtype
            if key not in graphs:
                graphs[key] = _traced_collective(kind, buffer.dtype, operation, process_set)
            run = partial(graphs[key], buffer, splits)
        output, received = run() if look is None else _run_watched(run, look)
        return from_wire(request, output.numpy(), received.numpy())

    # out of a graph that is being traced; a host function's thread has none
    with tf.init_scope(), tf.device("/cpu:0"), (watch or Watch(None, process_set)).watch_eager(name):
        return engine.carry_out(coroutine, execute)


def _traced_collective(kind: type[Request], dtype: Any, name: str, process_set: Any) -> Any:
    """Returns `carry_out` for one kind and name as a traced function of buffer and splits."""

    def run_collective(buffer: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return carry_out(kind, buffer, splits, name, process_set)

    given = [tf.TensorSpec([None], dtype), tf.TensorSpec([None], tf.int32)]
    return tf.function(run_collective, input_signature=given, autograph=False)


def _run_watched(run: Callable[[], Any], look: Callable[[], None]) -> Any:
    """Runs a function in a thread, and until it returns calls `look` again and again, which may raise."""
    given: list[Any] = []
    failed: list[BaseException] = []

    def run_and_store() -> None:
        try:
            with tf.device("/cpu:0"):
                given.append(run())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run_and_store, name="horovod_sparse.agreement", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        look()
    if failed:
        raise failed[0]
    return given[0]


def carry_out_agreement(coroutine: Synchronization[Any], process_set: Any, watch: Watch | None = None) -> Any:
    """Runs a coroutine that compares ranks before the first step; in elastic training on each rank alone."""
    if process_set.size() == 1 or is_elastic():
        return engine.carry_out(coroutine)
    name = f"horovod_sparse.{process_set.process_set_id}.plan"
    return carry_out_together(coroutine, process_set, name, looks=True, watch=watch)


def ranks_of(process_set: Any) -> str:
    """Returns a process set's ranks as text ("all" for the global one), which ranks compare."""
    return "all" if process_set is hvd.global_process_set else str(list(process_set.ranks))


def label_of(prefix: str, process_set: Any, variables: Sequence[Any]) -> str:
    """Returns a label, equal on all ranks, with which names of collectives for these variables begin."""
    model = [(variable.shape, tf.as_dtype(variable.dtype).name) for variable in variables]
    return next_label(f"{prefix}.{process_set.process_set_id}", model)
