"""`DistributedGradientTape`: Horovod's, with sparse synchronization where a sparsifier is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.merging import Plan
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.compression import Compression, SparseCompressor
from horovod_sparse.tensorflow.local import scaled_locally
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.tensorflow.tensors import as_variable

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


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
    ) -> Any:
        """Gradients, synchronized over ranks.

        Args:
            target: see `tf.GradientTape.gradient`.
            sources: variables, in any nested structure.
            output_gradients: see `tf.GradientTape.gradient`.
            use_generic_names: accepted for Horovod's sake; collectives have names of their own.
            unconnected_gradients: see `tf.GradientTape.gradient`.
            learning_rate: of this step, if it changes: error feedback then keeps up with it.

        Returns:
            As `sources`.
        """
        local = super(self.__class__, self).gradient(target, sources, output_gradients, unconnected_gradients)
        variables = [as_variable(source) for source in tf.nest.flatten(sources)]
        gradients = tf.nest.flatten(local)  # None and tf.IndexedSlices are one leaf each
        is_local = [variable.ref() in self._local_sources for variable in variables]
        shared = [i for i, kept in enumerate(is_local) if not kept]
        synchronized = self._synchronizer.synchronize(
            [gradients[i] for i in shared], [variables[i] for i in shared], learning_rate
        )
        results = list(gradients)
        for i, gradient in zip(shared, synchronized, strict=True):
            results[i] = gradient
        if self._scale_local:
            size = self._synchronizer.place[1]
            results = [
                scaled_locally(gradient, size) if kept else gradient
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


# Wrapping a tape happens within the user's tf.function: AutoGraph has nothing to do in here but to take
# seconds for it.
_COPIED = {name: item for name, item in vars(_Methods).items() if name[:2] != "__"}


@tf.autograph.experimental.do_not_convert
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
    *,
    bucket_bytes: int | None = None,
    plan: Plan | None = None,
) -> Any:
    """Wraps a tape so that gradients are synchronized over ranks, sparsely.

    Arguments, order and meaning are those of ``horovod.tensorflow.DistributedGradientTape``. With a
    `compression` that is no sparsifier, Horovod's own tape is returned.

    Works eagerly and within `tf.function`; there, collectives are native operations that run while
    backward goes on. Residuals are kept by `compression`: make it once, outside of the loop.

    Departures, where a sparsifier is given:

    * variables of Keras 3 are taken, too, and so are nested structures of variables;
    * gradients come from host memory whatever device they are used on, so the device arguments change
      nothing;
    * sums are taken in float32 or float64, so `gradient_predivide_factor` has nothing to protect: it is
      accepted, and changes nothing but rounding;
    * a variable whose gradient is None (in this function) although it once had one sends zeros, and gets
      the sum: what the others and its residual hold;
    * `tf.IndexedSlices` are gathered, as Horovod does it, or sparsified with ``sparse_as_dense=True``;
    * a NaN or Inf on any rank raises `NonFiniteGradientError` on every rank, and nothing is applied.

    Args:
        gradtape: to compute gradients with.
        device_dense: see above.
        device_sparse: see above.
        compression: a sparsifier (``Compression.exdyna(density=0.001)``), or one of Horovod's.
        sparse_as_dense: see above.
        op: Average or Sum.
        gradient_predivide_factor: see above; with Average only.
        num_groups: old name of an integer `groups`.
        groups: number of buckets, or lists of variables that form one each.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
        bucket_bytes: of gradient in a bucket; 32 MiB if left out.
        plan: which variables form which bucket, in place of `groups` and `bucket_bytes`.

    Returns:
        A tape.

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnsupportedError: for Adasum.
    """
    if not isinstance(compression, SparseCompressor):
        if isinstance(compression, str):
            raise ArgumentError(
                "compression",
                compression,
                "Compression.parse(text), made once outside of the training loop: it keeps the residuals",
            )
        if bucket_bytes is not None or plan is not None:
            raise ArgumentError(
                "compression", compression, "a sparsifier, which bucket_bytes and plan are for"
            )
        return hvd.DistributedGradientTape(
            gradtape,
            device_dense,
            device_sparse,
            compression,
            sparse_as_dense,
            op,
            gradient_predivide_factor,
            num_groups,
            groups,
            process_set,
            scale_local_gradients,
        )
    groups = checked(op, gradient_predivide_factor, num_groups, groups)
    synchronizer = compression.bind(
        process_set=process_set,
        average=op == hvd.Average,
        groups=groups,
        bucket_bytes=bucket_bytes,
        plan=plan,
        sparse_as_dense=sparse_as_dense,
    )
    cls = type(gradtape.__class__.__name__, (gradtape.__class__,), dict(_COPIED))
    tape = cls(gradtape._persistent, gradtape._watch_accessed_variables)
    tape._attach(gradtape, synchronizer, scale_local_gradients)
    return tape


@tf.autograph.experimental.do_not_convert
def PartialDistributedGradientTape(
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
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    *,
    bucket_bytes: int | None = None,
    plan: Plan | None = None,
) -> Any:
    """As `DistributedGradientTape`, but the gradients of some layers stay local.

    Args:
        gradtape: see `DistributedGradientTape`, as for all other arguments.
        device_dense: see there.
        device_sparse: see there.
        compression: see there.
        sparse_as_dense: see there.
        op: see there.
        gradient_predivide_factor: see there.
        num_groups: see there.
        groups: see there.
        process_set: see there.
        local_layers: a layer, or several.
        scale_local_gradients: see there.
        bucket_bytes: see there.
        plan: see there.

    Raises:
        ArgumentError: if something in `local_layers` is no layer.
    """
    layers = local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    layers = [layer for layer in layers if layer is not None]
    if not all(hasattr(layer, "trainable_weights") for layer in layers):
        raise ArgumentError("local_layers", local_layers, "layers")
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        bucket_bytes=bucket_bytes,
        plan=plan,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(as_variable(variable))
    return tape


def checked(op: Any, gradient_predivide_factor: float, num_groups: int, groups: Any) -> Any:
    """Refuses what tapes and optimizers refuse alike; gives `groups`, by whichever name it came.

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnsupportedError: for Adasum.
    """
    if op == hvd.Adasum:
        raise UnsupportedError(
            "op=Adasum cannot be combined with a sparsifier: it combines whole updates, and a residual has "
            "no place in that. Use op=Average or op=Sum, or compression=Compression.none"
        )
    if op not in (hvd.Average, hvd.Sum):
        raise ArgumentError("op", op, "Average or Sum")
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise ArgumentError("gradient_predivide_factor", gradient_predivide_factor, "1.0, or op=Average")
    if groups is None and num_groups:
        groups = num_groups
    is_number = isinstance(groups, int) and not isinstance(groups, bool) and groups >= 1
    if groups is not None and not isinstance(groups, list) and not is_number:
        raise ArgumentError("groups", groups, "a number of 1 or more, or lists of variables")
    return groups
