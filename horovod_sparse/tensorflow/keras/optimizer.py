"""`DistributedOptimizer` for Keras: Horovod's, with sparse reduction where a sparsifier is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd, takes_part
from horovod_sparse.tensorflow.arguments import Arguments
from horovod_sparse.tensorflow.collectives import construction_errors
from horovod_sparse.tensorflow.compression import Compression
from horovod_sparse.tensorflow.keras.distributed import Accumulation, DenseReducer, is_keras3, wrap
from horovod_sparse.tensorflow.keras.steps import make_own_steps
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.tensorflow.tensors import settings_of
from horovod_sparse.training.compression import check_momentum
from horovod_sparse.training.schedules import Schedule
from horovod_sparse.training.settings import PlannedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


@construction_errors.publishing_errors
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
    every: int = 1,
    delay: int = 0,
    **options: Unpack[PlannedOptions],
) -> Any:
    """Wraps a Keras optimizer, so that it synchronizes gradients over ranks, sparsely.

    Arguments, order and meaning are those of ``horovod.tensorflow.keras.DistributedOptimizer``. Works with
    Keras 3 and with new and legacy optimizers of tf-keras, in `fit` and in custom loops: `apply_gradients`
    reduces, whoever calls it. With a `compression` that is no sparsifier, gradients are reduced densely.

    * A `LossScaleOptimizer` goes inside: ``DistributedOptimizer(LossScaleOptimizer(SGD(0.1)), ...)``. A
      gradient that is not finite on any rank makes all ranks skip the step, and halve the scale. Without one
      it raises an error on every rank, unless `on_nonfinite` says otherwise.
    * ``jit_compile=True`` is refused. Where there is a GPU Keras' default "auto" means it: pass False there.
    * With "best" (and ``feedback`` "adam", "rmsprop" or "sgd") `apply_gradients` is the exchange: each rank
      makes its own step by Keras' formulas. ``optimizer.finish()`` ends a training with `every` or `delay`.
    * Sums are taken in float32 or float64 in host memory: `gradient_predivide_factor` changes nothing but
      rounding, and device arguments nothing.
    * `tf.IndexedSlices` are gathered, as Horovod does it, or sparsified with ``sparse_as_dense=True``.

    Args:
        optimizer: an optimizer of Keras 3 or tf-keras.
        name: the optimizer's new name; by default its own.
        compression: a sparsifier (``Compression.exdyna(density=0.001)``), text for `Compression.parse`, or
            one of Horovod's compressors.
        op: Average or Sum.
        backward_passes_per_step: passes whose gradients are added up before they are synchronized.
        average_aggregated_gradients: divide that sum by their number.
        num_groups: old name of an integer `groups`.
        groups: number of buckets, or lists of variables that form one each.
        process_set: the ranks that take part.
        scale_local_gradients: accepted for compatibility; no variable is local.
        every: steps from one exchange to the next, with "best" alone: see `horovod_sparse.training.steps`.
        delay: exchanges after which a mean is applied, with "best" alone.
        **options: settings of the training, all but `synchronize_at` and `max_grad_norm`: see
            `horovod_sparse.training.settings.Settings`.

    Returns:
        The optimizer itself, now of a class derived from its own, with `telemetry`, `plan`, `decision`,
        `state_dict` and `load_state_dict`.
    """
    arguments = Arguments.of(locals(), DistributedOptimizer).checked()
    check_count("backward_passes_per_step", backward_passes_per_step, "a number of 1 or more")
    arguments = arguments.parsed()
    if not arguments.is_sparse:
        arguments.raise_if_sparsifier_options()
    _check_optimizer(optimizer)
    is_scaler = hasattr(optimizer, "inner_optimizer")
    reducer: Any = None
    keeper: Any = None
    if arguments.is_sparse:
        recipe, fixed = arguments.compression.recipe, getattr(optimizer, "loss_scale_factor", None)
        if fixed is not None:
            raise ArgumentError("loss_scale_factor", fixed, "None, in a LossScaleOptimizer(optimizer)")
        Schedule(every, delay).check(recipe, arguments.settings)
        if recipe.feedback.applies_rate and takes_part(process_set):
            reducer = make_own_steps(optimizer.inner_optimizer if is_scaler else optimizer, arguments)
            for method in ("finish", "common"):
                object.__setattr__(optimizer, method, getattr(reducer, method))
        else:
            arguments.compression.reserve_for(optimizer, recipe)
            if not recipe.feedback.applies_rate:
                check_momentum(recipe, lambda: [settings_of(optimizer)])
            reducer = _make_synchronizer(arguments, settings_of(optimizer))
        keeper = arguments.compression._horovod_sparse_keeper
    accumulation = None
    if backward_passes_per_step > 1:
        given = backward_passes_per_step, average_aggregated_gradients, sparse_as_dense
        accumulation = Accumulation(*given)
    return wrap(optimizer, reducer or DenseReducer(arguments), accumulation, keeper, name)


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, (str, type)):
        example = "an optimizer of Keras, made: keras.optimizers.SGD(0.1), say"
        raise ArgumentError("optimizer", optimizer, example)
    known = hasattr(optimizer, "get_config") and hasattr(optimizer, "apply_gradients")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer) or not known:
        raise UnsupportedError(
            f"{type(optimizer).__name__} is no optimizer of Keras. Optimizers of TensorFlow 1 are wrapped by "
            "horovod_sparse.tensorflow.DistributedOptimizer"
        )
    if hasattr(optimizer, "_horovod_sparse_keeper") or hasattr(optimizer, "_allreduce_grads"):
        raise UnsupportedError(
            "the optimizer is a DistributedOptimizer already, by horovod_sparse or by Horovod: wrap it once"
        )


def _make_synchronizer(arguments: Arguments, own: Mapping[str, Any]) -> GradientSynchronizer:
    synchronizer = arguments.synchronizer()
    # ranks compare these, too: no variable tells of them. The rate is a variable, which may be broadcast
    told = {name: own[name] for name in own if name not in ("name", "learning_rate")}
    told = {name: value for name, value in told.items() if isinstance(value, (str, float, int, type(None)))}
    synchronizer.engine.given = {**told, **synchronizer.engine.given}
    return synchronizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **arguments: Any,
) -> Any:
    """Loads a saved, compiled model, and wraps its optimizer, which keeps its state.

    A ``.keras`` file of Keras 3 has the residuals of the rank that saved it; others start at zero. From a
    SavedModel folder of tf-keras Keras restores the weights, and no state of the optimizer.

    `compression` and further arguments are those of `DistributedOptimizer`, the first three are Horovod's.
    `legacy_opts` has no use, since the file says which optimizer it holds.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=known)
    model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **arguments)
    if is_keras3(model.optimizer) and str(filepath).endswith(".keras"):
        model.load_weights(filepath)  # with the residuals
    return model
