"""Gradients of synchronized gradients: there are none, and whoever asks for them is told so.

What is selected depends on the gradients themselves, and goes through the host. TensorFlow would give None,
which reads as a gradient of zero, where stock Horovod's dense sum has one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from horovod_sparse.errors import UnsupportedError

__all__ = ["refuse_differentiation"]

#: of operations that pass tensors on, to look their gradients up by
_SUMS, _GRADIENTS = "HorovodSparseSums", "HorovodSparseGradients"


def refuse_differentiation(sums: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sums, in the graph that is being traced; an error where a gradient goes through them.

    Args:
        sums: over ranks.
        gradients: that they are the sums of, dense, one or more.

    Example:
        >>> @tf.function
        ... def penalty(x):
        ...     with tf.GradientTape() as tape:
        ...         tape.watch(x)
        ...         y = x * x
        ...     return refuse_differentiation([tf.stop_gradient(y)], [y])[0]
        >>> x = tf.constant(3.0)
        >>> float(penalty(x))
        9.0
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     z = penalty(x)
        >>> tape.gradient(z, x)
        Traceback (most recent call last):
        tensorflow.python.framework.errors_impl.InvalidArgumentError: ...
    """
    sources = list(gradients)
    graph = tf.compat.v1.get_default_graph()
    smallest = min(range(len(sources)), key=lambda i: sources[i].shape.num_elements() or 0)
    with record.stop_recording():
        # one operation that all gradients go into, and of which a small tensor is kept
        with graph.gradient_override_map({"IdentityN": _GRADIENTS}):
            anchor = tf.identity_n(sources)[smallest]
        with graph.gradient_override_map({"IdentityN": _SUMS}):
            linked: list[tf.Tensor] = tf.identity_n([*sums, anchor])[:-1]
    # tapes in this graph do not look at the operation's gradient
    record.record_operation(_SUMS, linked, sources, _refuse)
    return linked


def _refuse(*_gradients: Any) -> Any:
    raise UnsupportedError(
        "the gradient of a sparsely synchronized gradient is asked for: there is none, since what is sent is "
        "selected. Differentiate before synchronizing (tf.GradientTape inside, the distributed one outside), "
        "or use compression=Compression.none"
    )


def _from_sums(operation: tf.Operation, *_gradients: tf.Tensor) -> list[Any]:
    return [*[None] * (len(operation.inputs) - 1), tf.zeros_like(operation.inputs[-1])]


def _from_gradients(operation: tf.Operation, *_gradients: tf.Tensor) -> list[tf.Tensor]:
    """Raises when it is run: it is built whenever a function is called under a tape."""

    def refuse() -> Any:
        try:
            _refuse()
        except UnsupportedError as error:  # by a kind that TensorFlow gives on, and by its name
            raise ValueError(f"UnsupportedError: {error}") from None

    refusal = tf.numpy_function(refuse, [], tf.float32)
    refusal.set_shape([])
    return [tf.zeros_like(tensor) + tf.cast(refusal, tensor.dtype) for tensor in operation.inputs]


with contextlib.suppress(KeyError):  # where this module is imported a second time, by doctests
    tf.RegisterGradient(_SUMS)(_from_sums)
    tf.RegisterGradient(_GRADIENTS)(_from_gradients)
