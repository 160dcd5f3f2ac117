"""What our tape does other than the user's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.telemetry import Telemetry
from horovod_sparse.tensorflow.local import scaled_locally
from horovod_sparse.tensorflow.order import ungated
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.tensorflow.tensors import as_variable

__all__ = ["distributed"]


class _Methods(tf.GradientTape):
    """What differs from the user's tape; copied into a class made for each tape, as Horovod does it."""

    def _attach(self: Any, gradtape: Any, synchronizer: GradientSynchronizer, scale_local: bool) -> None:
        self._tape = gradtape._tape
        self._synchronizer, self._scale_local = synchronizer, scale_local
        self._local_sources: set[Any] = set()

    @property
    def telemetry(self) -> Telemetry:
        """What happened in the last step, and means."""
        return self._synchronizer.telemetry

    @tf.autograph.experimental.do_not_convert
    def register_local_source(self, source: Any) -> None:
        """Keeps a variable's gradient local: it is not synchronized."""
        self._local_sources.add(as_variable(source).ref())

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        learning_rate: Any = None,
        loss_scale: Any = None,
    ) -> Any:
        """Gradients, synchronized over ranks.

        Args:
            target: see `tf.GradientTape.gradient`.
            sources: variables, in any nested structure.
            output_gradients: see `tf.GradientTape.gradient`.
            use_generic_names: accepted for Horovod's sake; collectives have names of their own.
            unconnected_gradients: see `tf.GradientTape.gradient`.
            learning_rate: of this step, if it changes: error feedback then keeps up with it.
            loss_scale: by which `target` is multiplied, a power of two: residuals are kept without it.
                Gradients that are not finite on some rank are NaN on all then, and no error: see to it
                that such a step is skipped (a `LossScaleOptimizer` does).

        Returns:
            As `sources`.
        """
        with ungated():  # of a tape before it
            local = super(self.__class__, self).gradient(
                target, sources, output_gradients, unconnected_gradients
            )
        variables = [as_variable(source) for source in tf.nest.flatten(sources)]
        gradients = tf.nest.flatten(local)  # None and tf.IndexedSlices are one leaf each
        is_local = [variable.ref() in self._local_sources for variable in variables]
        # one that is asked for twice (of layers that share it) has one gradient
        first = {variable.ref(): i for i, variable in reversed(list(enumerate(variables)))}
        shared = [i for i in sorted(first.values()) if not is_local[i]]
        given, theirs = [gradients[i] for i in shared], [variables[i] for i in shared]
        synchronizer: GradientSynchronizer = self._synchronizer
        if loss_scale is None:
            synchronized = synchronizer.synchronize(given, theirs, learning_rate)
        else:
            scale = tf.convert_to_tensor(as_variable(loss_scale))
            synchronized = synchronizer.synchronize_scaled(given, theirs, scale, learning_rate)
        results = list(gradients)
        for i, gradient in zip(shared, synchronized, strict=True):
            results[i] = gradient
        results = [results[first[variable.ref()]] for variable in variables]
        if self._scale_local:
            process_set = synchronizer.process_set
            results = [
                scaled_locally(gradient, process_set) if kept else gradient
                for gradient, kept in zip(results, is_local, strict=True)
            ]
        return tf.nest.pack_sequence_as(sources, results)

    @tf.autograph.experimental.do_not_convert
    def get_local_and_global_gradients(
        self: Any,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """As `gradient`: pairs (variable, gradient), those of local variables apart."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        local: list[tuple[Any, Any]] = []
        shared: list[tuple[Any, Any]] = []
        for source, gradient in zip(sources, gradients, strict=True):
            is_local = as_variable(source).ref() in self._local_sources
            (local if is_local else shared).append((source, gradient))
        return local, shared


_COPIED = {name: item for name, item in vars(_Methods).items() if name[:2] != "__"}


def distributed(gradtape: tf.GradientTape, synchronizer: GradientSynchronizer, scale_local: bool) -> Any:
    """A tape of a class derived from that of the user's tape, which it goes on recording with.

    Args:
        gradtape: the user's.
        synchronizer: of its gradients.
        scale_local: whether gradients of local variables are divided by the number of ranks.
    """
    user: Any = gradtape
    cls: Any = type(type(user).__name__, (type(user),), dict(_COPIED))
    tape = cls(user._persistent, user._watch_accessed_variables)
    tape._attach(user, synchronizer, scale_local)
    return tape
