"""Reads names, dtypes and settings of TensorFlow's variables and optimizers, those of Keras 3, too."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.errors import ArgumentError

#: alignment in bytes at which TensorFlow uses an array's memory without a copy
ALIGNMENT = 64

_NAMES = {dtype: dtype.name for dtype in (tf.float32, tf.float64, tf.float16, tf.bfloat16)}


def dtype_name(dtype: tf.DType) -> str | None:
    """Returns the name of a dtype that gradients may have, or None for any other dtype."""
    return _NAMES.get(tf.as_dtype(dtype))


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(tf.as_dtype(name).as_numpy_dtype)


def as_variable(variable: Any) -> Any:
    """Returns the `tf.Variable` within a Keras 3 variable, or the given `tf.Variable`."""
    if not hasattr(variable, "ref") and isinstance(getattr(variable, "value", None), tf.Variable):
        return variable.value
    return variable


def checked_variable(argument: str, given: Any) -> Any:
    """Returns the `tf.Variable` that a user gave; raises if it is none."""
    variable = as_variable(given)
    if not hasattr(variable, "ref"):
        raise ArgumentError(argument, given, "variables of TensorFlow or Keras")
    return variable


def is_comparable(variable: Any) -> bool:
    """True if a variable holds numbers, so that ranks can compare it."""
    if not hasattr(variable, "read_value"):
        return False
    return bool(variable.dtype.is_floating or variable.dtype.is_integer or variable.dtype.is_bool)


def create_variables(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes a Keras optimizer create its own variables, unless it has done so."""
    if hasattr(optimizer, "_create_all_weights"):  # tf-keras, of the old kind
        optimizer._create_all_weights(variables)
    elif hasattr(optimizer, "build") and not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
        optimizer.build(variables)


def variables_of(optimizer: Any) -> list[Any]:
    """Returns a Keras optimizer's slots, iterations and learning rate, but no residuals."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def as_dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def settings_of(optimizer: Any) -> dict[str, Any]:
    """Returns a Keras optimizer's settings by name; within a loss-scaling optimizer, the inner one's."""
    with tf.init_scope():  # settings may be variables, and this be a graph
        settings: dict[str, Any] = getattr(optimizer, "inner_optimizer", optimizer).get_config()
        return settings


def unique_names(variables: Sequence[Any], taken: Sequence[str] = ()) -> list[str]:
    """Returns a unique name for every variable: its own, with a number if several share it.

    Example:
        >>> unique_names([tf.Variable(0.0, name="w"), tf.Variable(0.0, name="w"), tf.Variable(0.0)])
        ['w', 'w_1', 'Variable']
    """
    names, used = [], set(taken)
    for variable in variables:
        own = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
        base = re.sub(r"[^A-Za-z0-9_./-]", "_", str(own).split(":")[0])
        name, number = base, 0
        while name in used:
            number += 1
            name = f"{base}_{number}"
        used.add(name)
        names.append(name)
    return names


def multiply(gradient: Any, factor: Any) -> Any:
    """Multiplies a gradient (or None, or `tf.IndexedSlices`) by a number."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(multiply(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def reduce_if_finite(
    reducer: Any, gradients: Sequence[Any], variables: Sequence[Any], scale: Any, skips: bool = True
) -> list[Any]:
    """Sums or averages the gradients of a scaled loss over ranks; NaN on all if one rank's is not finite.

    By NaN a `LossScaleOptimizer` skips the step. `skips` says that it does.
    """
    if not reducer.is_needed:
        return list(gradients)
    scale = tf.convert_to_tensor(scale)
    unscaled = [multiply(gradient, 1.0 / scale) for gradient in gradients]
    results, skipped = reducer.synchronize_or_skip(unscaled, variables, scaled=skips)
    if skipped is not None:
        scale = tf.where(skipped, tf.cast(float("nan"), scale.dtype), scale)
    return [multiply(gradient, scale) for gradient in results]


def aligned_zeros(num_bytes: int) -> np.ndarray:
    """Returns zero bytes at an address from which TensorFlow makes tensors without a copy."""
    raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


#: eager loops hold the last step's gradients while they compute the next ones
_NUM_KEPT = 2


class ReusedArrays:
    """Gives out arrays of fixed shapes, and reuses their memory once nothing refers to them.

    TensorFlow takes an aligned array that a host function returns as a tensor's memory, without a copy.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> None:
        self._shapes, self.dtype = shapes, dtype
        self._memories: list[tuple[list[np.ndarray], list[weakref.ref[np.ndarray]]]] = []

    def acquire(self) -> list[np.ndarray]:
        """Returns uninitialized arrays: reused ones, or new ones if all are still referred to."""
        free = (one for one in self._memories if not any(ref() is not None for ref in one[1]))
        arrays, lent = next(free, ([], []))
        if not arrays:
            sizes = [math.prod(shape) * self.dtype.itemsize for shape in self._shapes]
            pairs = zip(sizes, self._shapes, strict=True)
            arrays += [aligned_zeros(size).view(self.dtype).reshape(shape) for size, shape in pairs]
            self._memories = [*self._memories[1 - _NUM_KEPT :], (arrays, lent)]
        views = [array[...] for array in arrays]
        lent[:] = [weakref.ref(view) for view in views]
        return views
