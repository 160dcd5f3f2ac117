"""Reduces gradients, but those of local variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.tensorflow.collectives import label_of, marks_of
from horovod_sparse.tensorflow.tensors import as_variable, checked_variable, scaled_locally, times


class Reduction:
    """Reduces variables' gradients over ranks, except those of local variables."""

    def __init__(self, reducer: Any, scale_local: bool) -> None:
        self.reducer, self._scale_local = reducer, scale_local
        #: local variables, which differ between ranks as their optimizer state does
        self.local: set[Any] = set()
        self._name = ""

    def keep_local(self, argument: str, variable: Any) -> None:
        """Excludes a variable from the reduction; `argument` names where the user gave it, for errors."""
        self.local.add(checked_variable(argument, variable).ref())

    def is_local(self, variable: Any) -> bool:
        return as_variable(variable).ref() in self.local

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any, *, scaled: bool = False
    ) -> tuple[list[Any], tf.Tensor | None]:
        """Returns every variable's gradient (reduced, or local), and whether all ranks skip the step."""
        results, skipped = list(gradients), None
        shared = [i for i, variable in enumerate(variables) if not self.is_local(variable)]
        if shared:
            given = [gradients[i] for i in shared], [variables[i] for i in shared], learning_rate
            reduced, skipped = self.reducer.synchronize_or_skip(*given, scaled=scaled)
            for i, gradient in zip(shared, reduced, strict=True):
                results[i] = gradient
        if self._scale_local and self.reducer.is_needed:
            for i in set(range(len(results))).difference(shared):
                results[i] = scaled_locally(results[i], self.reducer.process_set)
        return results, skipped

    def reduce_if_finite(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        learning_rate: Any,
        scale: Any,
        skips: bool = True,
    ) -> list[Any]:
        """Reduces the gradients of a scaled loss; skips the step if a gradient is not finite.

        They are NaN on all ranks where one is not finite on some rank: by these a scaler skips the step.
        """
        if not self.reducer.is_needed:
            return list(gradients)
        scale = tf.convert_to_tensor(scale)
        unscaled = [times(gradient, 1.0 / scale) for gradient in gradients]
        results, skipped = self.reduce(unscaled, variables, learning_rate, scaled=skips)
        bad = [] if skipped is None else [skipped]
        local = [one for i, one in enumerate(gradients) if one is not None and self.is_local(variables[i])]
        if skips and local:
            ranks, every = self.reducer.process_set, [as_variable(variable) for variable in variables]
            self._name = self._name or label_of("horovod_sparse.finite", ranks, every)
            bad.append(tf.reduce_any(marks_of(local, self._name, ranks) > 0))
        factor = tf.where(tf.reduce_any(bad), tf.cast(float("nan"), scale.dtype), scale) if bad else scale
        return [times(gradient, factor) for gradient in results]


def reduced_once(
    reduce: Callable[[list[Any], list[Any]], list[Any]],
    gradients: Sequence[Any],
    variables: Sequence[Any],
) -> list[Any]:
    """Calls `reduce` with one gradient per variable, even if a variable is listed twice."""
    first: dict[Any, int] = {}
    for i, variable in enumerate(variables):
        first.setdefault(variable.ref(), i)
    positions = first.values()
    reduced = reduce([gradients[i] for i in positions], [variables[i] for i in positions])
    found = dict(zip(first, reduced, strict=True))
    return [found[variable.ref()] for variable in variables]


class GradientReduction:
    """Replaces Horovod's own reduction of gradients; given to Horovod as `compression=`."""

    def __init__(self, synchronizer: Any) -> None:
        self.synchronizer = synchronizer

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Any], vars: Sequence[Any], _generic_names: bool = False) -> list[Any]:
        return reduced_once(self.synchronizer.synchronize, grads, vars)
