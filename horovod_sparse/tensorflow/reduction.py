"""Reduces a tensor, by an `allreduce` that sends sparsely, and gradients, but those of local variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.tensorflow._horovod import hvd, present_start
from horovod_sparse.tensorflow.collectives import carry_out_together, label_of, marks_of
from horovod_sparse.tensorflow.compression import Compression, SparseCompressor, lone_array, on_host
from horovod_sparse.tensorflow.graph import refuse_graphs
from horovod_sparse.tensorflow.tensors import as_variable, checked_variable, dtype_name, scaled_locally, times
from horovod_sparse.training import compression as common
from horovod_sparse.training.agreement import compared


@tf.autograph.experimental.do_not_convert
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = hvd.global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Sums or averages a tensor over ranks, of which each sends what a sparsifier selects.

    The equation, what ranks compare, and errors are those of `horovod_sparse.torch.allreduce`; arguments and
    order are those of ``horovod.tensorflow.allreduce``. In a `tf.function` the sum is taken on the host, and
    errors are TensorFlow's, with the text of ours. With a compression that is no sparsifier, and for integers
    and `tf.IndexedSlices`, it is Horovod's function: an integer on one rank and a float on another end in the
    deadline.

    Args:
        compression: a sparsifier, text for `Compression.parse`, or one of Horovod's compressors.
        op: Average (default) or Sum.
        prescale_factor: factor of the tensor, before elements are selected.
        postscale_factor: factor of the sum.
        name: the same on all ranks; without one it is the tensor's in a graph, else calls are counted.

    Raises:
        UnsupportedError: for op=Adasum, a gradient through the sum, ``jit_compile=True``, or TensorFlow 1.

    Example:
        >>> import horovod_sparse.tensorflow as hvd; hvd.init()  # doctest: +SKIP
        >>> tensor = tf.constant([1.0, -4.0, 2.0])
        >>> hvd.allreduce(tensor, compression="topk:density=0.4").numpy()  # doctest: +SKIP
        array([ 0., -4.,  0.], dtype=float32)
    """
    if isinstance(compression, str):
        compression = Compression.parse(compression)
    sparsifies = isinstance(compression, SparseCompressor) and not isinstance(tensor, tf.IndexedSlices)
    if sparsifies:
        tensor = tf.convert_to_tensor(tensor)
    if not sparsifies or dtype_name(tensor.dtype) is None:
        factors, devices = (prescale_factor, postscale_factor), (device_dense, device_sparse)
        last = name, process_set, ignore_name_scope
        return hvd.allreduce(tensor, average, *devices, compression, op, *factors, *last)
    refuse_graphs()
    given = compression.recipe, op, average, prescale_factor, postscale_factor, process_set
    scale, facts_of = common.terms(hvd, *given)
    if name is None:
        eagerly = tf.executing_eagerly()
        name = common.call_name(present_start(), process_set) if eagerly else tensor.name.replace(":", ".")
    label, place = name, (int(process_set.rank()), int(process_set.size()))

    def together(array: np.ndarray) -> np.ndarray:
        total, coroutine = array, compared(facts := facts_of(array.shape, array.dtype.name))
        if array.size:
            total, lone = lone_array(array, compression.recipe, label, place)
            coroutine = lone.summed(facts, scale)
        carry_out_together(coroutine, process_set, f"horovod_sparse.allreduce.{label}")
        return total

    return on_host(together, tensor if prescale_factor == 1.0 else times(tensor, prescale_factor))


class Reduction:
    """Keeps local variables apart, and reduces the others' gradients. Keras does not look in here."""

    def __init__(self, reducer: Any, scale_local: bool) -> None:
        self.reducer, self._scale_local = reducer, scale_local
        #: variables that are each rank's own, and so their optimizer's state
        self.local: set[Any] = set()
        self._name = ""

    def keep_local(self, argument: str, variable: Any) -> None:
        """Leaves a variable's gradient to this rank; errors are about the argument that gave it."""
        self.local.add(checked_variable(argument, variable).ref())

    def is_local(self, variable: Any) -> bool:
        return as_variable(variable).ref() in self.local

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any, *, scaled: bool = False
    ) -> tuple[list[Any], tf.Tensor | None]:
        """Returns a gradient per variable, reduced or local, and whether all ranks skip the step."""
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
        """Reduces gradients of a loss times the scale, a power of two.

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
    """Reduces one gradient a variable, also where a tape is asked for it twice (of layers that share it)."""
    first: dict[Any, int] = {}
    for i, variable in enumerate(variables):
        first.setdefault(variable.ref(), i)
    positions = first.values()
    reduced = reduce([gradients[i] for i in positions], [variables[i] for i in positions])
    found = dict(zip(first, reduced, strict=True))
    return [found[variable.ref()] for variable in variables]


class GradientReduction:
    """Reduces gradients in the place of Horovod's own function; Horovod takes it as `compression=`."""

    def __init__(self, synchronizer: Any) -> None:
        self.synchronizer = synchronizer

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Any], vars: Sequence[Any], _generic_names: bool = False) -> list[Any]:
        return reduced_once(self.synchronizer.synchronize, grads, vars)
