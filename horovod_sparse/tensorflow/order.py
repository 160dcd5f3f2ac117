"""What comes after what in a graph, where data do not say so."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

__all__ = ["WAITING", "Order"]


class Order:
    """Puts operations behind those that were noted last, graph by graph.

    A tensor is kept by its name: it would keep its graph, and a graph the memory that it works on.

    Example:
        >>> order, seen = Order(), []
        >>> @tf.function
        ... def both():
        ...     for i in range(2):
        ...         with order.behind():
        ...             order.note(tf.numpy_function(lambda i=i: seen.append(i) or 0, [], tf.int64))
        >>> both()
        >>> seen
        [0, 1]
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
