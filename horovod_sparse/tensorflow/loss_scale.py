"""Gradients of a scaled loss: reduced without the scale, or skipped on all ranks together.

A loss is scaled so that small gradients survive in float16; the scale changes from step to step, and an
overflow is no error but a sign that it is too large. Residuals outlive both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.agreement import label_of
from horovod_sparse.tensorflow.collectives import known_to_elastic, not_folded
from horovod_sparse.tensorflow.tensors import as_variable, times
from horovod_sparse.tensorflow.waiting import Watch


class ScaledReduction:
    """Reduces gradients of a scaled loss; not finite on any rank, they become NaN on all.

    Residuals are kept without the scale. Scales are powers of two, so nothing is lost when gradients are
    multiplied by it again.
    """

    def __init__(self, process_set: Any, watch: Watch | None = None) -> None:
        self._process_set, self._name = process_set, ""
        self._watch = watch or Watch(None, process_set)

    def __call__(
        self,
        reduce: Callable[[list[Any]], list[Any]],
        gradients: Sequence[Any],
        variables: Sequence[Any],
        scale: Any,
        skips: bool = True,
    ) -> list[Any]:
        """Reduced gradients, of the loss times the scale."""

        def reduced() -> list[Any]:
            sums = reduce([times(gradient, 1.0 / scale) for gradient in gradients])
            return [times(gradient, scale) for gradient in sums]

        def skipped() -> list[Any]:
            return [times(gradient, float("nan")) for gradient in gradients]

        if not skips:
            return reduced()
        num_bad = self._num_bad(gradients, variables)
        if tf.executing_eagerly():
            return skipped() if int(num_bad) else reduced()
        # both branches give the same ones; which ones a reduction gives is known when it is traced
        given: list[int] = []

        def reduced_ones() -> list[Any]:
            sums = reduced()
            given[:] = [i for i, gradient in enumerate(sums) if gradient is not None]
            return [sums[i] for i in given]

        def skipped_ones() -> list[Any]:
            zeros = [tf.zeros_like(as_variable(variable)) for variable in variables]
            every = [zeros[i] if gradient is None else gradient for i, gradient in enumerate(gradients)]
            return [times(every[i], float("nan")) for i in given]

        results = iter(tf.cond(tf.equal(num_bad, 0), reduced_ones, skipped_ones))
        return [next(results) if i in given else None for i in range(len(gradients))]

    def _num_bad(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tf.Tensor:
        """On how many ranks a gradient is not finite."""
        if not self._name:
            every = [as_variable(variable) for variable in variables]
            self._name = label_of("horovod_sparse.finite", self._process_set, every)
        present = [gradient for gradient in gradients if gradient is not None]
        bad = [tf.reduce_any(~tf.math.is_finite(_values(gradient))) for gradient in present]

        def summed(number: tf.Tensor) -> tf.Tensor:
            with known_to_elastic():
                return hvd.allreduce(
                    not_folded(number),
                    op=hvd.Sum,
                    name=self._name,
                    ignore_name_scope=True,
                    process_set=self._process_set,
                )

        return self._watch.around(tf.cast(tf.reduce_any(bad), tf.int32), self._name, summed)


def nan_where(gradients: Sequence[Any], skipped: Any) -> list[Any]:
    """Gradients that have a LossScaleOptimizer skip a step where all ranks are to skip it."""
    if skipped is None:
        return list(gradients)
    return [times(gradient, tf.where(skipped, float("nan"), 1.0)) for gradient in gradients]


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
