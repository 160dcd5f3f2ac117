"""Adds host functions to graphs, ordered by their inputs; raises in graphs that cannot call them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod_sparse.errors import UnsupportedError

#: device of messages: arrays of k elements stay on the host
HOST = "/cpu:0"


def raise_if_unsupported_graph() -> None:
    """Raises if the graph being traced cannot call host functions: XLA's, or one of TensorFlow 1."""
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


def run_independently(operation: Any, kind: str) -> None:
    """Lets an operation (or its input of type `kind`) run out of the order of a graph's side effects."""
    order = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
    if order is not None:
        while operation.type != kind:
            operation = operation.inputs[0].op
        order.run_independently(operation)


class HostFunctions:
    """Adds host functions to graphs, and keeps them alive: graphs, never freed, refer to them weakly."""

    def __init__(self) -> None:
        self._by_graph: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def add_to_graph(
        self, function: Callable[..., Any], inputs: Sequence[tf.Tensor], types: Sequence[tf.DType]
    ) -> list[tf.Tensor]:
        """Adds a host function to a graph, which calls it in every step as soon as its inputs are ready.

        It waits for no earlier operation, though `tf.function` orders side effects. Its errors arrive as an
        `InvalidArgumentError`: an unknown error would end a training under ``hvd.elastic.run``.
        """
        results = list(tf.numpy_function(self._keep_with_graph(function), list(inputs), list(types)))
        run_independently(results[0].op, "PyFunc")
        return results

    def _keep_with_graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        graph: Any = tf.compat.v1.get_default_graph()
        while hasattr(graph, "outer_graph"):  # also for outer graphs, since a branch's graph is freed early
            self._by_graph.setdefault(graph, []).append(function)
            graph = graph.outer_graph
        reference = weakref.ref(function)

        def call_if_alive(*arrays: np.ndarray) -> Any:
            living = reference()
            if living is None:
                raise UnsupportedError("this graph's compressor or optimizer was deleted: keep a reference")
            try:
                return living(*arrays)
            except (TypeError, ValueError, tf.errors.UnknownError):  # the last is a failure of Horovod's
                raise
            except Exception as error:
                # TensorFlow maps ValueError to an error that quotes the class name
                raise type(type(error).__name__, (ValueError,), {})(str(error)) from error

        return call_if_alive


class EagerCalls:
    """Calls a function as a graph from eager code; traces it once for each list of variables."""

    def __init__(self, build: Callable[..., list[Any]]) -> None:
        self._build = build
        self._functions: dict[Any, Any] = {}

    def __call__(self, gradients: Sequence[Any], variables: list[Any], *fixed: Any) -> list[Any]:
        missing = tuple(gradient is None for gradient in gradients)
        # tensors differ in every step, so only their positions count
        ids = tuple(None if isinstance(variable, tf.Tensor) else id(variable) for variable in variables)
        key = (ids, missing, fixed)
        if key not in self._functions:

            def build_graph(given: list[Any]) -> list[Any]:
                present = iter(given)
                every = [None if absent else next(present) for absent in missing]
                return self._build(every, variables, *fixed)

            self._functions[key] = tf.function(build_graph, autograph=False, reduce_retracing=True)
        given, function = [item for item in gradients if item is not None], self._functions[key]
        if tf.config.functions_run_eagerly():  # the user debugs functions; this one needs a graph
            function = function.get_concrete_function(given)
        return list(function(given))


#: attribute of gradients that a distributed tape has synchronized
_MARK = "_horovod_sparse_synchronized"


def mark_synchronized(gradients: Sequence[Any]) -> None:
    for gradient in gradients:
        if isinstance(gradient, tf.Tensor):
            setattr(gradient, _MARK, True)


def is_synchronized(gradient: Any) -> bool:
    """True if `mark_synchronized` has marked this gradient, which a distributed tape has returned."""
    return hasattr(gradient, _MARK)


class Order:
    """Makes a graph's synchronizations run one after another, in the order in which they are noted."""

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def after(self) -> Any:
        """Returns a context whose new operations run after the last noted one."""
        graph = tf.compat.v1.get_default_graph()
        name = self._last.get(graph)
        return tf.control_dependencies([] if name is None else [graph.get_tensor_by_name(name)])

    def set_last(self, token: tf.Tensor) -> None:
        """Notes the end of a synchronization: operations within the next `after()` run after it."""
        self._last[tf.compat.v1.get_default_graph()] = token.name


#: Order of the synchronizations whose ends threads wait for, the same on all ranks: otherwise two ranks might
#: deadlock, if all threads of each wait for a synchronization that the other has no free thread to begin.
WAITING = Order()


class _Gate:
    """Makes all operations added to a graph later wait for one; TensorFlow calls its methods for each."""

    def __init__(self, operation: Any) -> None:
        self.control_inputs = [operation]
        # at the stack's bottom, since a context of the user's has to be on top when it ends
        operation.graph._control_dependencies_stack.insert(0, self)

    def op_in_group(self, _operation: Any) -> bool:
        return False  # True would mean that this input waits already

    def add_op(self, _operation: Any) -> None:
        pass


def gate_later_operations(token: tf.Tensor) -> None:
    """Makes operations added later wait for a tensor, so that a step that raises updates no variable."""
    _Gate(token.op)


@contextlib.contextmanager
def ungated() -> Iterator[None]:
    """Returns a context for operations that update no variable, and so need not wait for gates."""
    graph: Any = tf.compat.v1.get_default_graph()
    every = graph._control_dependencies_stack
    graph._control_dependencies_stack = [one for one in every if not isinstance(one, _Gate)]
    try:
        yield
    finally:
        graph._control_dependencies_stack = every
