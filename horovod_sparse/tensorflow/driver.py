"""Puts a coroutine into a graph: host functions between Horovod's native operations, one per round.

    start ─▶ allgather ─▶ resume ─▶ allreduce ─▶ resume ─▶ ... ─▶ settle

`start` and `resume` are Python functions on NumPy arrays that look everything up when they are called,
so nothing of a step is frozen into the graph; the collectives are asynchronous kernels, so no thread
waits and backward goes on meanwhile. Ranks may run buckets in any order: Horovod matches by name, and
within a bucket data dependencies fix the order.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod_sparse.collectives import AllToAll, Exchange, Synchronization
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensorflow.collectives import NO_SPLITS, Wire, carry_out, wire_dtype
from horovod_sparse.tensorflow.courier import Courier, between_pairs, courier_for
from horovod_sparse.tensorflow.task import Task

__all__ = ["HOST", "HostFunctions", "Job", "refuse_graphs", "settle", "unroll"]

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


class HostFunctions:
    """Host functions of graphs: kept as long as this object and a graph that they are made in.

    TensorFlow keeps for ever what it is given to call, and Keras its graphs. So neither gets to know more
    than a weak reference: with this object go residuals and all else that the functions work on.
    """

    def __init__(self) -> None:
        self._by_graph: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def run(
        self, function: Callable[..., Any], inputs: Sequence[tf.Tensor], types: Sequence[tf.DType]
    ) -> list[tf.Tensor]:
        """A host function in a graph: run in every step, as soon as its inputs are there.

        Within `tf.function`, operations with side effects run one after the other, as they were built. A
        bucket would wait for the collectives of those before it, so this is called off here: inputs alone
        say what comes after what.

        What it raises arrives as an `InvalidArgumentError`. Most errors would be an `UnknownError` to
        TensorFlow: Horovod's failures come as such, and ``hvd.elastic.run`` takes one that it does not know
        for the training's end.

        Args:
            function: takes and gives NumPy arrays; holds no tensors, which would keep their graph.
            inputs: for its arguments.
            types: of its results.
        """
        results = list(tf.numpy_function(self._weakly(function), list(inputs), list(types)))
        order = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
        if order is not None:
            operation = results[0].op
            while operation.type != "PyFunc":  # TensorFlow's debuggers put operations of theirs behind it
                operation = operation.inputs[0].op
            order.run_independently(operation)
        return results

    def _weakly(self, function: Callable[..., Any]) -> Callable[..., Any]:
        graph: Any = tf.compat.v1.get_default_graph()
        while hasattr(graph, "outer_graph"):  # a branch's graph goes when its operation has been made
            self._by_graph.setdefault(graph, []).append(function)
            graph = graph.outer_graph
        reference = weakref.ref(function)

        def call(*arrays: np.ndarray) -> Any:
            living = reference()
            if living is None:
                raise UnsupportedError(
                    "this graph outlives the compressor or the optimizer that it was traced for: keep it"
                )
            try:
                return living(*arrays)
            except (TypeError, ValueError, tf.errors.UnknownError):  # the last is a failure of Horovod's
                raise
            except Exception as error:
                # TensorFlow looks at the kind, and quotes its name
                raise type(type(error).__name__, (ValueError,), {})(str(error)) from error

        return call


@dataclass(frozen=True, eq=False)
class Job:
    """A synchronization to be put into a graph.

    Attributes:
        task: holds the coroutine between host functions, in every step anew.
        make: called with the learning rate and the gradients as NumPy arrays (TensorFlow's memory, to be
            read, during the call and the coroutine's first leg only); gives the coroutine.
    """

    task: Task
    make: Callable[..., Synchronization[Any]]

    def begin(self, rate: np.ndarray, arrays: Sequence[np.ndarray], place: tuple[int, int]) -> Wire:
        """Runs the coroutine to its first request; gives what the first collective takes."""
        self.task.legs.clear()
        with self.task.working():
            try:
                coroutine = self.make(rate, *arrays)
            except Exception as error:
                return self.task.fail(error, place)
            return self.task.start(coroutine, place)

    def entrust(
        self, rate: np.ndarray, arrays: Sequence[np.ndarray], place: tuple[int, int], courier: Courier
    ) -> None:
        """As `begin`, and leaves the rest to the courier; `task.wait` ends it."""
        self.task.legs.clear()
        try:
            coroutine = self.make(rate, *arrays)
        except Exception as error:
            self.task.fail(error, place)
        else:
            self.task.entrust(coroutine, place, courier)


def unroll(
    jobs: Sequence[Job],
    gradients: Sequence[Sequence[tf.Tensor]],
    rate: tf.Tensor,
    place: Callable[[], tuple[int, int]],
    process_set: Any,
    host: HostFunctions,
) -> tf.Tensor:
    """The operations of synchronizations that begin together. Builds them; runs nothing.

    Each has its own collectives, but what the host does between two rounds is one call for all of them:
    calling Python costs as much as a small bucket.

    Where messages go between pairs of ranks and MPI can be used, that is one operation: a courier has the
    rest, and `task.wait` ends it.

    Args:
        jobs: of the same kinds of requests.
        gradients: of each of them.
        rate: of this step: see `as_rate`.
        place: tells (rank, size) within the process set, when the graph runs.
        process_set: who takes part.
        host: keeps the host functions.

    Returns:
        int32 [], ready when the coroutines have ended, well or not, or are under way with the courier; for
        `settle`.
    """
    tasks, kinds = [job.task for job in jobs], jobs[0].task.kinds
    sizes = [len(tensors) for tensors in gradients]

    def apart(arrays: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
        ends = list(itertools.accumulate(sizes))
        return [arrays[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    inputs = [rate, *(tensor for tensors in gradients for tensor in tensors)]
    courier: Courier | None = None
    if between_pairs(kinds):
        courier, transport = courier_for(process_set)
        for task in tasks:
            task.transport = transport

    def entrust(rate: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        assert courier is not None
        here = place()
        for job, own in zip(jobs, apart(arrays, sizes), strict=True):
            job.entrust(rate, own, here, courier)
        return [np.zeros((), np.int32)]

    def start(rate: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        own, here = apart(arrays, sizes), place()
        return given([job.begin(rate, mine, here) for job, mine in zip(jobs, own, strict=True)], 0)

    def resume(number: np.ndarray, *outputs: np.ndarray) -> list[np.ndarray]:
        wires = []
        for task, own in zip(tasks, apart(outputs, [1 + has_splits(int(number))] * len(tasks)), strict=True):
            with task.working():
                wires.append(task.resume(own[0], own[1] if len(own) > 1 else NO_SPLITS))
        return given(wires, int(number) + 1)

    def given(wires: Sequence[Wire], number: int) -> list[np.ndarray]:
        if number == len(kinds):
            return [np.zeros((), np.int32)]
        return [array for wire in wires for array in wire[: 1 + has_splits(number)]]

    def has_splits(number: int) -> bool:
        return kinds[number] in (Exchange, AllToAll)

    def types(number: int) -> list[tf.DType]:
        if number == len(kinds):
            return [tf.int32]
        return [
            tf.as_dtype(dtype)
            for task in tasks
            for dtype in (wire_dtype(kinds[number], task.value_dtype), np.int32)[: 1 + has_splits(number)]
        ]

    with tf.device(HOST):
        if courier is not None:
            messages = host.run(entrust, inputs, [tf.int32])
        else:
            messages = host.run(start, inputs, types(0))
            for number, kind in enumerate(kinds):
                answers = [tf.constant(number, tf.int32)]
                for task, own in zip(
                    tasks, apart(messages, [1 + has_splits(number)] * len(tasks)), strict=True
                ):
                    for tensor in own:
                        tensor.set_shape([None])
                    splits = own[1] if len(own) > 1 else None
                    answer = carry_out(kind, own[0], splits, f"{task.name}.{number}", process_set)
                    answers += answer[: len(own)]
                messages = host.run(resume, answers, types(number + 1))
        messages[0].set_shape([])
        return messages[0]


def settle(
    tokens: Sequence[tf.Tensor],
    finish: Callable[[], list[np.ndarray]],
    like: Sequence[tuple[tf.DType, Any]],
    host: HostFunctions,
) -> list[tf.Tensor]:
    """What comes of several synchronizations, when all of them have ended.

    An error is raised here, and nowhere else: this rank has nothing under way any more then.

    Args:
        tokens: of `unroll`.
        finish: gives the results, or raises. Arrays aligned to 64 bytes are not copied.
        like: dtype and shape of every result.
        host: keeps the host functions.
    """

    def call(*_tokens: np.ndarray) -> list[np.ndarray]:
        return finish()

    with tf.device(HOST):
        results = host.run(call, list(tokens), [dtype for dtype, _ in like])
    for result, (_, shape) in zip(results, like, strict=True):
        result.set_shape(shape)
    return list(results)
