"""What comes after what in a graph, where data do not say so."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


class Order:
    """Puts operations behind those that were noted last, graph by graph.

    A tensor is kept by its name: it would keep its graph, and a graph the memory that it works on.
    """

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def behind(self) -> Any:
        """A context: what is made in it runs after what was noted last."""
        graph = tf.compat.v1.get_default_graph()
        name = self._last.get(graph)
        return tf.control_dependencies([] if name is None else [graph.get_tensor_by_name(name)])

    def note(self, token: tf.Tensor) -> None:
        """The next ones run after this one."""
        self._last[tf.compat.v1.get_default_graph()] = token.name


#: Ends of synchronizations that a thread waits for. In one order on all ranks: otherwise all threads of one
#: rank might wait for what another one has not begun, because its threads wait for what this one has not.
WAITING = Order()


class _Gate:
    """A control dependency of all that is made in a graph from now on: an operation, or the next call."""

    def __init__(self, graph: Any, operation: Any = None) -> None:
        self._graph = weakref.ref(graph)
        self._found: list[Any] = [] if operation is None else [operation]
        self._num_before = len(graph.get_operations())
        self._waits = operation is None
        # below the user's own: those leave in the order in which they came
        graph._control_dependencies_stack.insert(0, self)

    @property
    def control_inputs(self) -> list[Any]:
        graph = self._graph()
        if self._waits and graph is not None:
            later = graph.get_operations()[self._num_before :]
            self._num_before += len(later)
            for operation in later:
                self._look_at(operation)
        return self._found

    def _look_at(self, operation: Any) -> None:
        """The call, and what takes its result first: a call without side effects is not waited for."""
        found = self._found
        if not found and operation.type in _CALLS:
            found.append(operation)
        elif self._waits and found and any(tensor.op is found[0] for tensor in operation.inputs):
            found.append(operation)
            self._waits = False

    def op_in_group(self, _operation: Any) -> bool:
        return False

    def add_op(self, _operation: Any) -> None:
        pass


_CALLS = ("If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall")


def gate(token: tf.Tensor) -> None:
    """Puts all that is made from now on in the graph that is being traced behind a tensor.

    Updates of variables do not always need a gradient: weight decay and counts of steps do not. They are not
    to happen in a step that ends in an error.

    Example:
        >>> count = tf.Variable(0)
        >>> def fail():
        ...     raise ArithmeticError
        >>> @tf.function
        ... def step():
        ...     gate(tf.numpy_function(fail, [], tf.int64))
        ...     count.assign_add(1)
        >>> try:
        ...     step()
        ... except tf.errors.OpError:
        ...     print(count.numpy())
        0
    """
    _Gate(token.graph, token.op)


def gate_callers(graph: Any) -> None:
    """As `gate`, around a graph that becomes a function: all that is made after its call runs after it."""
    graph = getattr(graph, "outer_graph", None)
    while graph is not None and hasattr(graph, "outer_graph"):
        _Gate(graph)
        graph = graph.outer_graph


@contextlib.contextmanager
def ungated() -> Iterator[None]:
    """What is made in it need not wait for gates: it updates nothing."""
    graph: Any = tf.compat.v1.get_default_graph()
    every = graph._control_dependencies_stack
    graph._control_dependencies_stack = [one for one in every if not isinstance(one, _Gate)]
    try:
        yield
    finally:
        graph._control_dependencies_stack = every
