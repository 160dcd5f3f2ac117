"""`DistributedOptimizer` for Keras: Horovod's, with sparse reduction where a sparsifier is given."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from horovod.tensorflow.keras import DistributedOptimizer as _stock

from horovod_sparse.checks import check_count
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.merging import Plan
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.arguments import checked_groups, refuse_sparse_arguments
from horovod_sparse.tensorflow.compression import Compression, SparseCompressor
from horovod_sparse.tensorflow.keras import keras2
from horovod_sparse.tensorflow.keras.dense import DenseReducer
from horovod_sparse.tensorflow.keras.reduction import Accumulation, Reducer, Reduction, SparseReducer
from horovod_sparse.tensorflow.momentum import refuse_double_momentum

__all__ = ["DistributedOptimizer", "is_keras3"]


def is_keras3(optimizer: Any) -> bool:
    """Whether it is an optimizer of Keras 3: Keras 2 has no `stateless_apply`."""
    return hasattr(optimizer, "stateless_apply")


class _Again:
    """Wraps another optimizer in the same way; it may not share the residuals of the first.

    Args:
        arguments: of `DistributedOptimizer`, by name.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments

    def __call__(self, other: Any) -> Any:
        arguments, compression = self._arguments, self._arguments["compression"]
        if isinstance(compression, SparseCompressor):
            own = SparseCompressor(compression.recipe, compression.process_set)
            arguments = {**arguments, "compression": own}
        return DistributedOptimizer(other, **arguments)

    def __reduce__(self) -> Any:
        if self._arguments["process_set"] is not hvd.global_process_set:
            raise UnsupportedError(
                "an optimizer of some ranks alone cannot be copied or pickled: wrap a plain optimizer again, "
                "with the same process_set"
            )
        return _again_for, (
            {name: value for name, value in self._arguments.items() if name != "process_set"},
        )


def _again_for(arguments: dict[str, Any]) -> _Again:
    return _Again({**arguments, "process_set": hvd.global_process_set})


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    bucket_bytes: int | None = None,
    plan: Plan | None = None,
    merging: Any = None,
    tensor_selection: Any = None,
    profile: Any = None,
) -> Any:
    """Wraps a Keras optimizer so that gradients are synchronized over ranks, sparsely.

    Arguments, order and meaning are those of ``horovod.tensorflow.keras.DistributedOptimizer``. Works
    with Keras 3, in `fit` and in custom loops, with ``run_eagerly`` and without; and with tf-keras, new
    and legacy optimizers, in `fit` and `minimize`.

    With a `compression` that is no sparsifier, gradients are reduced densely: by Horovod's own optimizer
    under tf-keras, and by ours with Horovod's allreduce under Keras 3, where Horovod's reduces nothing.

    Under Keras 3:

    * `apply_gradients` and `apply` reduce, whoever calls them; do not give them what a
      `DistributedGradientTape` has reduced already. Under tf-keras `apply_gradients` alone does not, as in
      Horovod: custom loops use the tape;
    * a `LossScaleOptimizer` goes inside: ``DistributedOptimizer(LossScaleOptimizer(SGD(0.1)), ...)``. A
      gradient that is not finite on any rank makes all ranks skip the step, and halve the scale; residuals
      are kept without the scale;
    * ``jit_compile=True`` is refused. Keras' default "auto" means XLA where there is a GPU: pass
      ``compile(..., jit_compile=False)`` there;
    * the optimizer's state is taken over where it has one (after ``keras.models.load_model``).

    Under tf-keras a `LossScaleOptimizer` may go around or inside (``mixed_float16`` puts it around): it comes
    out around what is distributed, and all ranks skip a step together there, too.

    Everywhere, where a sparsifier is given:

    * sums are taken in float32 or float64, so `gradient_predivide_factor` has nothing to protect: it is
      accepted, and changes nothing but rounding. Device arguments change nothing: buckets are in host memory;
    * `tf.IndexedSlices` are gathered, as Horovod does it, or sparsified with ``sparse_as_dense=True``;
    * with no loss scaling, NaN or Inf on any rank raises an error on every rank, and nothing is applied;
    * residuals are no variables: they enter `tf.train.Checkpoint`, and under Keras 3 `BackupAndRestore`
      and ``model.save``, too. They differ from rank to rank: to resume exactly, let every rank save a file
      of its own. ``load_model`` gives an optimizer that is not distributed: wrap it again, or use ours.

    Args:
        optimizer: of Keras 3 or tf-keras.
        name: of the optimizer; "Distributed..." under tf-keras, the optimizer's own under Keras 3.
        device_dense: see above.
        device_sparse: see above.
        compression: a sparsifier (``Compression.exdyna(density=0.001)``), text for `Compression.parse`, or
            one of Horovod's compressors.
        sparse_as_dense: see above.
        gradient_predivide_factor: see above; with Average only.
        op: Average or Sum.
        backward_passes_per_step: passes whose gradients are added up before they are synchronized.
        average_aggregated_gradients: divide that sum by their number.
        num_groups: old name of an integer `groups`.
        groups: number of buckets, or lists of variables that form one each.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
        bucket_bytes: of gradient in a bucket; 32 MiB if left out.
        plan: which variables form which bucket, in place of `groups` and `bucket_bytes`.
        merging: how buckets are made: "layerwise", "single", "omgs", "optimal", "joint",
            ``fixed(num_elements=...)``, ``fixed(bytes=...)`` (`horovod_sparse.merging.fixed`), a function
            of a workload and a cost model, or a `Plan`. Those that go by times (the three in the middle)
            begin with the default plan, and measure 5 steps; see `hvd.callbacks.ReplanCallback`.
        tensor_selection: which variables are sparsified: "cost" (where it pays, by measured times), "all",
            ``min_elements(...)`` (`horovod_sparse.merging.min_elements`), or a function of a variable's
            facts that says yes or no.
        profile: a `horovod_sparse.cost.Profile`, or the path of a saved one, the same on all ranks: what it
            holds is not measured.

    Returns:
        An optimizer of a class derived from that of `optimizer`, with `telemetry`, `plan`, `decision`,
        `is_measured`, `replan`, `state_dict`, `load_state_dict` and `register_local_var` besides.

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnsupportedError: for Adasum, or an optimizer that cannot be wrapped.
    """
    groups = checked_groups(op, gradient_predivide_factor, num_groups, groups)
    check_count("backward_passes_per_step", backward_passes_per_step, "a number of 1 or more")
    if isinstance(compression, str):
        compression = Compression.parse(compression)
    is_sparse = isinstance(compression, SparseCompressor)
    if not is_sparse:
        refuse_sparse_arguments(
            compression,
            bucket_bytes=bucket_bytes,
            plan=plan,
            merging=merging,
            tensor_selection=tensor_selection,
            profile=profile,
        )
    if isinstance(optimizer, tf.compat.v1.train.Optimizer) or not hasattr(optimizer, "get_config"):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is no optimizer of Keras. Optimizers of TensorFlow 1 are wrapped by "
            "horovod.tensorflow.DistributedOptimizer, with Compression.none or .fp16"
        )

    again = _Again(
        {
            "name": name,
            "device_dense": device_dense,
            "device_sparse": device_sparse,
            "compression": compression,
            "sparse_as_dense": sparse_as_dense,
            "gradient_predivide_factor": gradient_predivide_factor,
            "op": op,
            "backward_passes_per_step": backward_passes_per_step,
            "average_aggregated_gradients": average_aggregated_gradients,
            "groups": groups,
            "process_set": process_set,
            "scale_local_gradients": scale_local_gradients,
            "bucket_bytes": bucket_bytes,
            "plan": plan,
            "merging": merging,
            "tensor_selection": tensor_selection,
            "profile": profile,
        }
    )
    is_scaler = hasattr(optimizer, "inner_optimizer")
    if is_scaler and not is_keras3(optimizer):  # there, what is distributed goes inside
        return keras2.scaled_again(optimizer, again(optimizer.inner_optimizer))
    reducer: Reducer | None = None
    if is_sparse:
        refuse_double_momentum(compression.recipe, optimizer)
        synchronizer = compression.bind(
            process_set=process_set,
            average=op == hvd.Average,
            groups=groups,
            bucket_bytes=bucket_bytes,
            plan=plan,
            merging=merging,
            tensor_selection=tensor_selection,
            profile=profile,
            sparse_as_dense=sparse_as_dense,
        )
        if backward_passes_per_step > 1 or is_scaler:
            synchronizer.replanning.refuse(
                "a LossScaleOptimizer" if is_scaler else "backward_passes_per_step above 1"
            )
        reducer = SparseReducer(synchronizer, compression.keeper)
    elif is_keras3(optimizer):
        reducer = DenseReducer(
            compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups,
            process_set=process_set,
            sparse_as_dense=sparse_as_dense,
            device_dense=device_dense,
            device_sparse=device_sparse,
        )
    if is_keras3(optimizer) and reducer is not None:
        from horovod_sparse.tensorflow.keras import keras3  # Keras 3 need not be installed

        accumulation = None
        if backward_passes_per_step > 1:
            accumulation = Accumulation(
                backward_passes_per_step, average_aggregated_gradients, sparse_as_dense
            )
        reduction = Reduction(reducer, scale_local_gradients)
        return keras3.wrap(optimizer, reduction, accumulation, name, again)
    wrapped = _stock(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=hvd.Compression.none if is_sparse else compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=reducer.process_set if reducer is not None else process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return keras2.attach(wrapped, reducer, again) if isinstance(reducer, SparseReducer) else wrapped
