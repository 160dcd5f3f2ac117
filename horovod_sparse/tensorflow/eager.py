"""Synchronizing eagerly: through a function of its own, where all collectives are under way together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["EagerCalls"]


class EagerCalls:
    """Functions that do eagerly what a graph would do; one for each list of variables.

    Args:
        build: called with gradients (None where there is none), variables and a scalar tensor, in a graph;
            gives one gradient per variable, or None: not always where it got None.

    Example:
        >>> calls = EagerCalls(lambda gradients, variables, factor: [
        ...     None if gradient is None else gradient * factor for gradient in gradients])
        >>> six, nothing = calls([tf.constant(2.0), None], [1, 2], tf.constant(3.0))
        >>> float(six), nothing
        (6.0, None)
    """

    def __init__(self, build: Callable[[list[Any], list[Any], tf.Tensor], list[Any]]) -> None:
        self._build = build
        self._functions: dict[Any, Any] = {}

    def __call__(self, gradients: Sequence[Any], variables: list[Any], scalar: tf.Tensor) -> list[Any]:
        """As `build`."""
        missing = tuple(gradient is None for gradient in gradients)
        # a tensor is another one in every step, and only its place among the others counts
        ids = tuple(None if isinstance(variable, tf.Tensor) else id(variable) for variable in variables)
        key = (ids, missing)
        if key not in self._functions:

            def call(given: list[Any], scalar: tf.Tensor) -> list[Any]:
                waiting = iter(given)
                every = [None if absent else next(waiting) for absent in missing]
                return self._build(every, variables, scalar)

            self._functions[key] = tf.function(call, autograph=False, reduce_retracing=True)
        given, function = [item for item in gradients if item is not None], self._functions[key]
        if tf.config.functions_run_eagerly():  # the user's, to be looked into; of this one a graph is made
            function = function.get_concrete_function(given, scalar)
        return list(function(given, scalar))
