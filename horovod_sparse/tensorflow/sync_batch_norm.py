"""`SyncBatchNormalization`: statistics over the batches of all ranks. Under tf-keras it is Horovod's own."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf
from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization as _stock

from horovod_sparse.errors import ArgumentError
from horovod_sparse.tensorflow._horovod import hvd, is_elastic
from horovod_sparse.tensorflow.collectives import known_to_elastic, label_of
from horovod_sparse.tensorflow.tensors import as_variable


class _Sum:
    """A differentiable sum over ranks, whose names follow from the layer's shape and its turn."""

    def __init__(self, variable: Any) -> None:
        label = label_of("horovod_sparse.statistics", hvd.global_process_set, [as_variable(variable)])
        self._label = label
        #: of calls in a graph: a layer may be used twice in one
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __call__(self, values: tf.Tensor) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        number = 0 if tf.executing_eagerly() else self._calls.get(graph, 0)
        self._calls[graph] = number + 1

        def summed(tensor: tf.Tensor, what: str) -> tf.Tensor:
            with known_to_elastic():
                name = f"{self._label}.{number}.{what}"
                return hvd.allreduce(tensor, op=hvd.Sum, name=name, ignore_name_scope=True)

        @tf.custom_gradient
        def both_ways(tensor: tf.Tensor) -> Any:
            return summed(tensor, "forward"), lambda upstream: summed(upstream, "backward")

        return both_ways(values)


class _SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Batch normalization with statistics over the batches of all ranks, in training.

    Every sample counts the same, also where ranks have batches of different sizes (Horovod's averages
    their statistics). With one rank it is Keras' own.

    Args:
        fused: accepted for Horovod's sake: must be False.
        **arguments: of `keras.layers.BatchNormalization`.

    Raises:
        ArgumentError: for ``fused=True``.

    Example:
        >>> layer = SyncBatchNormalization(axis=1)
        >>> layer(tf.ones([4, 2])).shape
        TensorShape([4, 2])
    """

    def __init__(self, fused: bool | None = False, **arguments: Any) -> None:
        if fused is not False:
            raise ArgumentError("fused", fused, "False: statistics of all ranks are taken one by one")
        super().__init__(**arguments)
        self._horovod_sparse_sum: _Sum | None = None

    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        if hvd.size() == 1 and not is_elastic():
            return mean, variance
        if self._horovod_sparse_sum is None:
            self._horovod_sparse_sum = _Sum(self.moving_mean)
        if mask is None:
            count = tf.reduce_prod(tf.gather(tf.shape(inputs), self._reduction_axes))
        else:
            count = tf.math.count_nonzero(mask)
        count = tf.cast(count, mean.dtype)
        own = tf.concat([count * mean, count * (variance + mean * mean), [count]], 0)
        total = self._horovod_sparse_sum(own)
        means, squares = tf.split(total[:-1] / tf.maximum(total[-1], 1.0), 2)
        return means, tf.maximum(squares - means * means, 0.0)


# Keras 3 has another `_moments`, which Horovod's layer does not know
_is_keras3 = not hasattr(tf.keras.layers.BatchNormalization, "_calculate_mean_and_var")
if _is_keras3:
    _SyncBatchNormalization.__name__ = _SyncBatchNormalization.__qualname__ = "SyncBatchNormalization"
    tf.keras.utils.register_keras_serializable("horovod_sparse")(_SyncBatchNormalization)
SyncBatchNormalization: Any = _SyncBatchNormalization if _is_keras3 else _stock
