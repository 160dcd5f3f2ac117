"""Puts a coroutine into a graph: host functions between Horovod's native operations, one per round.

    start ─▶ allgather ─▶ resume ─▶ allreduce ─▶ resume ─▶ ... ─▶ settle

`start` and `resume` are Python functions on NumPy arrays that look everything up when they are called,
so nothing of a step is frozen into the graph; the collectives are asynchronous kernels, so no thread
waits and backward goes on meanwhile. Ranks may run buckets in any order: Horovod matches by name, and
within a bucket data dependencies fix the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod_sparse.collectives import AllToAll, Exchange, Synchronization
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensorflow.collectives import Wire, carry_out, wire_dtype
from horovod_sparse.tensorflow.courier import Courier, between_pairs, courier_for
from horovod_sparse.tensorflow.task import Task

__all__ = ["HOST", "on_host", "refuse_graphs", "settle", "unroll"]

#: where messages live: what has k elements stays on the host
HOST = "/cpu:0"


def refuse_graphs() -> None:
    """Refuses graphs that no host function can work in: XLA's, and those of TensorFlow 1.

    Raises:
        UnsupportedError: within ``tf.function(jit_compile=True)``, and without eager execution.
    """
    with tf.init_scope():  # out of a tf.function, but not out of a tf.Graph
        if not tf.executing_eagerly():
            raise UnsupportedError(
                "a graph of TensorFlow 1, which runs in a session, cannot be combined with a sparsifier: the "
                "ranks agree about buckets while a step is built. Use eager execution or tf.function, or "
                "compression=Compression.none"
            )
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UnsupportedError(
            "jit_compile=True cannot be combined with a sparsifier, which selects on the host between "
            "collectives: use tf.function without jit_compile, or model.compile(..., jit_compile=False)"
        )


def unroll(
    task: Task,
    make: Callable[..., Synchronization[Any]],
    place: Callable[[], tuple[int, int]],
    inputs: Sequence[tf.Tensor],
    process_set: Any,
) -> tf.Tensor:
    """The operations of one synchronization. Builds them; runs nothing, except eagerly.

    Where messages go between pairs of ranks and MPI can be used, that is one operation: a courier has the
    rest, and `task.wait` ends it.

    Args:
        task: holds the coroutine between host functions, in every step anew.
        make: called with the inputs as NumPy arrays (TensorFlow's memory, to be read, during the call
            and the coroutine's first leg only); gives the coroutine.
        place: tells (rank, size) within the process set, when the graph runs.
        inputs: what `make` needs of the graph.
        process_set: who takes part.

    Returns:
        int32 [], ready when the coroutine has ended, well or not, or is under way with the courier; for
        `settle`.
    """
    if between_pairs(task.kinds):
        courier, task.transport = courier_for(process_set)
        if courier is not None:
            return _entrusted(task, make, place, inputs, courier)

    def start(*arrays: np.ndarray) -> list[np.ndarray]:
        task.legs.clear()
        with task.working():
            try:
                coroutine = make(*arrays)
            except Exception as error:
                return given(task.fail(error, place()), 0)
            return given(task.start(coroutine, place()), 0)

    def resume(output: np.ndarray, splits: np.ndarray, round_number: np.ndarray) -> list[np.ndarray]:
        with task.working():
            return given(task.resume(output, splits), int(round_number) + 1)

    def given(wire: Wire, round_number: int) -> list[np.ndarray]:
        if round_number == len(task.kinds):
            return [np.zeros((), np.int32)]
        return list(wire) if has_splits(round_number) else [wire[0]]

    def has_splits(round_number: int) -> bool:
        return task.kinds[round_number] in (Exchange, AllToAll)

    def types(round_number: int) -> list[tf.DType]:
        if round_number == len(task.kinds):
            return [tf.int32]
        kind = task.kinds[round_number]
        return [tf.as_dtype(wire_dtype(kind, task.value_dtype)), *([tf.int32] * has_splits(round_number))]

    with tf.device(HOST):
        message = on_host(start, list(inputs), types(0))
        for number, kind in enumerate(task.kinds):
            for tensor in message:
                tensor.set_shape([None])
            splits = message[1] if has_splits(number) else None
            output, received = carry_out(kind, message[0], splits, f"{task.name}.{number}", process_set)
            message = on_host(resume, [output, received, tf.constant(number, tf.int32)], types(number + 1))
        message[0].set_shape([])
        return message[0]


def _entrusted(
    task: Task,
    make: Callable[..., Synchronization[Any]],
    place: Callable[[], tuple[int, int]],
    inputs: Sequence[tf.Tensor],
    courier: Courier,
) -> tf.Tensor:
    def start(*arrays: np.ndarray) -> list[np.ndarray]:
        task.legs.clear()
        try:
            coroutine = make(*arrays)
        except Exception as error:
            task.fail(error, place())
        else:
            task.entrust(coroutine, place(), courier)
        return [np.zeros((), np.int32)]

    with tf.device(HOST):
        token = on_host(start, list(inputs), [tf.int32])[0]
        token.set_shape([])
        return token


def on_host(
    function: Callable[..., Any], inputs: Sequence[tf.Tensor], types: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """A host function in a graph: run in every step, as soon as its inputs are there.

    Within `tf.function`, operations with side effects run one after the other, as they were built. A
    bucket would wait for the collectives of those before it, so this is called off here: inputs alone
    say what comes after what.

    What it raises arrives as an `InvalidArgumentError`. Most errors would be an `UnknownError` to
    TensorFlow: Horovod's failures come as such, and ``hvd.elastic.run`` takes one that it does not know for
    the training's end.

    Args:
        function: takes and gives NumPy arrays.
        inputs: for its arguments.
        types: of its results.
    """

    def call(*arrays: np.ndarray) -> Any:
        try:
            return function(*arrays)
        except (TypeError, ValueError, tf.errors.UnknownError):  # the last is a failure of Horovod's
            raise
        except Exception as error:
            # TensorFlow looks at the kind, and quotes its name
            raise type(type(error).__name__, (ValueError,), {})(str(error)) from error

    results = list(tf.numpy_function(call, list(inputs), list(types)))
    if not tf.executing_eagerly():
        order = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
        if order is not None:
            order.run_independently(results[0].op)
    return results


def settle(
    tokens: Sequence[tf.Tensor],
    finish: Callable[[], list[np.ndarray]],
    like: Sequence[tuple[tf.DType, Any]],
) -> list[tf.Tensor]:
    """What comes of several synchronizations, when all of them have ended.

    An error is raised here, and nowhere else: this rank has nothing under way any more then.

    Args:
        tokens: of `unroll`.
        finish: gives the results, or raises. Arrays aligned to 64 bytes are not copied.
        like: dtype and shape of every result.
    """

    def call(*_tokens: np.ndarray) -> list[np.ndarray]:
        return finish()

    with tf.device(HOST):
        results = on_host(call, list(tokens), [dtype for dtype, _ in like])
    for result, (_, shape) in zip(results, like, strict=True):
        result.set_shape(shape)
    return list(results)
