"""Tapes and optimizers by their names in `horovod.tensorflow`, with a sparsifier where one is given.

Horovod's own tape and optimizers of TensorFlow 1 get the function that reduces their gradients from
`horovod.tensorflow._make_allreduce_grads_fn`. This module wraps it: they take our `compression=`, too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import horovod._keras as _horovod_keras
import tensorflow as tf

from horovod_sparse.errors import ArgumentError
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.tensorflow._horovod import hvd, takes_part
from horovod_sparse.tensorflow.arguments import Arguments
from horovod_sparse.tensorflow.collectives import construction_errors
from horovod_sparse.tensorflow.compression import Compression, SparseCompressor
from horovod_sparse.tensorflow.graph import mark_synchronized, ungated
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.tensorflow.tensors import as_variable, reduce_if_finite
from horovod_sparse.training.settings import PlannedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GradientReduction:
    """Synchronizes gradients in place of Horovod's own reduction; Horovod gets it as `compression=`."""

    def __init__(self, synchronizer: Any) -> None:
        self.synchronizer = synchronizer

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Any], vars: Sequence[Any], _generic_names: bool = False) -> list[Any]:
        return list(self.synchronizer.synchronize(grads, vars))


def _accept_sparsifiers(make: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates Horovod's `_make_allreduce_grads_fn`, so that its `compression` may be a sparsifier."""
    signature = inspect.signature(make)

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(make)
    def make_reduction(*positional: Any, **named: Any) -> Any:
        given = signature.bind(*positional, **named).arguments
        compression = given["compression"]
        if isinstance(compression, SparseCompressor):
            compression.reserve_for()
            return GradientReduction(Arguments(**given).checked().synchronizer())
        return compression if isinstance(compression, GradientReduction) else make(*positional, **named)

    return make_reduction


if not hasattr(hvd._make_allreduce_grads_fn, "__wrapped__"):  # doctests import this module a second time
    hvd._make_allreduce_grads_fn = _accept_sparsifiers(hvd._make_allreduce_grads_fn)


# Wrapping a tape happens within the user's tf.function: AutoGraph has nothing to do in here but to take
# seconds for it.
@tf.autograph.experimental.do_not_convert
@construction_errors.publishing_errors
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    **options: Unpack[PlannedOptions],
) -> Any:
    """Wraps a tape, so that its gradients are synchronized over ranks, sparsely.

    Arguments, order and meaning are those of ``horovod.tensorflow.DistributedGradientTape``; with a
    `compression` that is no sparsifier its tape is returned. With one, all that
    `horovod_sparse.tensorflow.keras.DistributedOptimizer` says of gradients holds, and:

    * sources may be variables of Keras 3, in any nested structure;
    * a variable that once had a gradient, and has None in this function, sends zeros, and gets the sum: what
      the others and its residual hold.
    * nothing can be differentiated through the result: TensorFlow gives None for it, or leaves its term
      out of a larger loss, and says nothing. A plain tape before this one has gradients of gradients.

    Args:
        gradtape: the user's tape, which has recorded the loss.
        compression: a sparsifier (``Compression.exdyna(density=0.001)``), made once, outside of the loop,
            since it keeps the residuals; or one of Horovod's.
        **options: settings of the training, all but `synchronize_at` and `max_grad_norm`: see
            `horovod_sparse.training.settings.Settings`.
    """
    arguments = Arguments.of(locals(), DistributedGradientTape)
    if not isinstance(gradtape, tf.GradientTape) or hasattr(gradtape, "_allreduce_grads"):  # Horovod's own
        raise ArgumentError("gradtape", gradtape, "a tf.GradientTape, after its with block")
    if not arguments.is_sparse:
        if isinstance(compression, str):
            raise ArgumentError(
                "compression",
                compression,
                "Compression.parse(text), made once outside of the training loop: it keeps the residuals",
            )
        arguments.raise_if_sparsifier_options()
        takes_part(process_set)  # raises where only Horovod's other binding was started
        stock = hvd.DistributedGradientTape
        return stock(gradtape, **arguments.taken_by(stock))
    compression.reserve_for()
    cls: Any = _DistributedTape
    if not issubclass(cls, kind := type(gradtape)):  # as Horovod's tape, with what the user's class overrides
        cls = type(kind.__name__, (cls, kind), {})
    return cls(gradtape, arguments.checked().synchronizer())


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    **options: Unpack[PlannedOptions],
) -> Any:
    """Wraps an optimizer; takes the arguments of ``horovod.tensorflow.DistributedOptimizer``, in order.

    Optimizers of Keras go to `horovod_sparse.tensorflow.keras.DistributedOptimizer`, with `op` and `groups`,
    which Horovod drops on that way; those of TensorFlow 1 (`tf.compat.v1.train.Optimizer`) to Horovod's own.
    """
    arguments = Arguments.of(locals(), DistributedOptimizer).parsed()
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from horovod_sparse.tensorflow.keras import optimizer as of_keras  # Keras is slow to import

        return of_keras.DistributedOptimizer(optimizer, **arguments.taken_by(of_keras.DistributedOptimizer))
    if arguments.is_sparse:
        reduction = GradientReduction(arguments.checked().synchronizer())
        arguments = dataclasses.replace(arguments, compression=reduction)
    else:
        arguments.raise_if_sparsifier_options()
    return hvd.DistributedOptimizer(optimizer, **arguments.taken_by(hvd.DistributedOptimizer))


_create = _horovod_keras.create_distributed_optimizer


@functools.wraps(_create)
def _create_optimizer(keras: Any, **given: Any) -> Any:
    """Called by Horovod to wrap a Keras optimizer; uses this package's wrapper for a sparsifier."""
    if isinstance(given.get("compression"), SparseCompressor):
        return DistributedOptimizer(**given)
    return _create(keras=keras, **given)


_horovod_keras.create_distributed_optimizer = _create_optimizer


class _DistributedTape(tf.GradientTape):
    """A tape that continues the recording of a user's tape, and synchronizes the gradients."""

    #: after `gradient`: bool [], True if all ranks must skip the step; None unless on_nonfinite="skip"
    skipped: tf.Tensor | None = None

    def __init__(self, user: Any, synchronizer: GradientSynchronizer) -> None:
        self.__dict__.update(vars(user))
        self._recording, self._synchronizer = False, synchronizer

    @property
    def telemetry(self) -> Telemetry:
        """Reports of the last step, and means over steps."""
        return self._synchronizer.telemetry

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        loss_scale: Any = None,
    ) -> Any:
        """Computes gradients, and returns them synchronized over ranks.

        Behind ``feedback="adam"`` they are normalized, for a plain ``SGD(learning_rate, weight_decay=...)``.

        Args:
            target, sources, output_gradients, unconnected_gradients: see `tf.GradientTape.gradient`.
            use_generic_names: accepted for Horovod's sake; collectives have names of their own.
            loss_scale: factor of `target`, a power of two; the result keeps it, residuals are without it.
                Gradients that are not finite on some rank are NaN on all then, and no error: see to it
                that such a step is skipped (a `LossScaleOptimizer` does).

        Returns:
            As `sources`.
        """
        with ungated():  # not after the gate of an earlier tape
            local = super().gradient(target, sources, output_gradients, unconnected_gradients)
        variables = [as_variable(source) for source in tf.nest.flatten(sources)]
        gradients = tf.nest.flatten(local)  # None and tf.IndexedSlices are one leaf each
        synchronizer = self._synchronizer
        if loss_scale is None:
            results, self.skipped = synchronizer.synchronize_or_skip(gradients, variables)
        else:
            results = reduce_if_finite(synchronizer, gradients, variables, as_variable(loss_scale))
        mark_synchronized(results)
        return tf.nest.pack_sequence_as(sources, results)
