"""`DistributedOptimizer` for Keras: Horovod's, with sparse reduction where a sparsifier is given."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from horovod.tensorflow.keras import DistributedOptimizer as _stock

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd, takes_part
from horovod_sparse.tensorflow.arguments import Again, Arguments, checked_layers
from horovod_sparse.tensorflow.collectives import construction_errors
from horovod_sparse.tensorflow.compression import Compression
from horovod_sparse.tensorflow.graph import is_synchronized
from horovod_sparse.tensorflow.keras.stepping import bound, no_local_variables, own_class
from horovod_sparse.tensorflow.reduction import GradientReduction, Reduction
from horovod_sparse.tensorflow.state import CheckpointedState, StateKeeper, WithState
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.tensorflow.tensors import settings_of
from horovod_sparse.training.compression import refuse_double_momentum
from horovod_sparse.training.settings import SKIP, PlannedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


@construction_errors.telling
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
    """Wraps a Keras optimizer so that gradients are synchronized over ranks, sparsely.

    Arguments, order and meaning are those of ``horovod.tensorflow.keras.DistributedOptimizer``. Works with
    Keras 3, in `fit` and in custom loops; and with tf-keras, new and legacy optimizers, in `fit` and
    `minimize`. With a `compression` that is no sparsifier, gradients are reduced densely, under Keras 3, too,
    where Horovod's own optimizer reduces nothing.

    * Under Keras 3 `apply_gradients` and `apply` reduce, whoever calls them. Under tf-keras `minimize` does,
      as in Horovod, and `apply_gradients` alone is refused.
    * A `LossScaleOptimizer` goes inside: ``DistributedOptimizer(LossScaleOptimizer(SGD(0.1)), ...)``; under
      tf-keras also around. A gradient that is not finite on any rank makes all ranks skip the step, and
      halve the scale. Without one it raises an error on every rank, unless `on_nonfinite` says otherwise.
    * ``jit_compile=True`` is refused. Keras' default "auto" means XLA where there is a GPU: pass
      ``compile(..., jit_compile=False)`` there.
    * With "best" (and ``feedback`` "adam", "rmsprop" or "sgd") `apply_gradients` is the exchange: each rank
      makes its own step of Adam, AdamW, RMSprop or SGD, with Keras' settings, schedules and weight decay.
      Keras' slots have second moments or velocities where a model is saved. ``optimizer.finish()`` ends a
      training with `every` or `delay`.
    * Sums are taken in float32 or float64 in host memory: `gradient_predivide_factor` changes nothing but
      rounding, and device arguments nothing.
    * `tf.IndexedSlices` are gathered, as Horovod does it, or sparsified with ``sparse_as_dense=True``.
    * Residuals are no variables, and differ from rank to rank: docs/resuming.md says how they are saved.

    Args:
        optimizer: of Keras 3 or tf-keras.
        name: of the optimizer; "Distributed..." under tf-keras, the optimizer's own under Keras 3.
        compression: a sparsifier (``Compression.exdyna(density=0.001)``), text for `Compression.parse`, or
            one of Horovod's compressors.
        op: Average or Sum.
        backward_passes_per_step: passes whose gradients are added up before they are synchronized.
        average_aggregated_gradients: divide that sum by their number.
        num_groups: old name of an integer `groups`.
        groups: number of buckets, or lists of variables that form one each.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
        every: steps from one exchange to the next, with "best" alone: see `horovod_sparse.training.steps`.
        delay: exchanges after which a mean is applied, with "best" alone.
        **options: settings of the training, all but `synchronize_at` and `max_grad_norm`: see
            `horovod_sparse.training.settings.Settings`. Under tf-keras ``on_nonfinite="skip"`` is refused,
            and `check_every` compares variables of the model alone.

    Returns:
        The optimizer itself, with all that it has: it is of a class derived from its own now, with
        `telemetry`, `plan`, `decision`, `state_dict`, `load_state_dict` and `register_local_var`.
    """
    arguments = Arguments.of(locals(), DistributedOptimizer).checked()
    check_count("backward_passes_per_step", backward_passes_per_step, "a number of 1 or more")
    arguments = arguments.parsed()
    if not arguments.is_sparse:
        arguments.refuse_sparsifier_options()
    _check_optimizer(optimizer)
    again, is_scaler = Again(DistributedOptimizer, arguments), hasattr(optimizer, "inner_optimizer")
    if is_scaler and not is_keras3(optimizer):  # there, what is distributed goes inside
        inner = DistributedOptimizer(optimizer.inner_optimizer, **arguments.taken_by(DistributedOptimizer))
        if arguments.is_sparse and not optimizer.dynamic:
            inner._allreduce_grads.fixed_scale = optimizer.initial_scale
        return optimizer
    synchronizer: Any = None
    keeper: Any = None
    if arguments.is_sparse:
        recipe = arguments.compression.recipe
        if recipe.feedback.applies_rate and takes_part(process_set):
            synchronizer = bound(optimizer.inner_optimizer if is_scaler else optimizer, arguments)
            for method in ("finish", "common"):
                object.__setattr__(optimizer, method, getattr(synchronizer, method))
        else:
            if (every, delay) != (1, 0):
                allowed = "'best' with every > 1 or delay > 0: gradients are exchanged in every step"
                raise ArgumentError("compression", compression, allowed)
            arguments.compression.serve(optimizer, recipe)
            if not recipe.feedback.applies_rate:
                refuse_double_momentum(recipe, lambda: [settings_of(optimizer)])
            synchronizer = _synchronizer(arguments, settings_of(optimizer))
        keeper = arguments.compression._horovod_sparse_keeper
    if is_keras3(optimizer):
        from horovod_sparse.tensorflow.keras import keras3  # Keras 3 need not be installed

        accumulation = None
        if backward_passes_per_step > 1:
            accumulation = keras3.Accumulation(
                backward_passes_per_step, average_aggregated_gradients, sparse_as_dense
            )
        reducer = synchronizer or keras3.DenseReducer(arguments)
        reducing = Reduction(reducer, scale_local_gradients)
        return keras3.wrap(optimizer, reducing, accumulation, keeper, name, again)
    if arguments.settings.on_nonfinite == SKIP:
        raise UnsupportedError(
            "on_nonfinite='skip' needs an optimizer of Keras 3: under tf-keras Horovod's own applies "
            "gradients. Give 'raise'"
        )
    if synchronizer is None:
        return _as_horovods(optimizer, arguments)
    reduction = KerasReduction(optimizer, synchronizer)
    return _with_state(_as_horovods(optimizer, replace(arguments, compression=reduction)), keeper, again)


def is_keras3(optimizer: Any) -> bool:
    """True for an optimizer of Keras 3: Keras 2 has no `stateless_apply`."""
    return hasattr(optimizer, "stateless_apply")


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


def _synchronizer(arguments: Arguments, own: Mapping[str, Any]) -> GradientSynchronizer:
    synchronizer = arguments.synchronizer()
    # ranks compare these, too: no variable tells of them. The rate is a variable, which may be broadcast
    told = {name: own[name] for name in own if name not in ("name", "learning_rate")}
    told = {name: value for name, value in told.items() if isinstance(value, (str, float, int, type(None)))}
    synchronizer.engine.given = {**told, **synchronizer.engine.given}
    return synchronizer


class KerasReduction(GradientReduction):
    """Reduces the gradients of one optimizer of tf-keras, or carries out its own steps."""

    def __init__(self, optimizer: Any, synchronizer: Any) -> None:
        super().__init__(synchronizer)
        self._optimizer = optimizer
        #: True from a reduction to the step that applies it
        self.is_reduced = False
        #: that of a LossScaleOptimizer(dynamic=False)
        self.fixed_scale: float | None = None

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Any], vars: Sequence[Any], _generic_names: bool = False) -> list[Any]:
        optimizer, scale = self._optimizer, self._scale()
        rate = getattr(optimizer, "learning_rate", None)
        if callable(rate) and not hasattr(rate, "dtype"):  # a schedule
            rate = rate(optimizer.iterations)
        if optimizer._agg_helper is not None:
            grads = _take_sums(optimizer._agg_helper, grads)
        if scale is None:
            sums = self.synchronizer.synchronize(grads, vars, rate)
        else:
            sums = Reduction(self.synchronizer, False).reduce_if_finite(grads, vars, rate, *scale)
        self.is_reduced = True
        return sums

    def _scale(self) -> tuple[Any, bool] | None:
        """Returns the scale of the loss, and whether an overflow skips the step."""
        if not getattr(self._optimizer, "_is_wrapped_by_loss_scale_optimizer", False):
            return None
        if self._optimizer._agg_helper is not None:
            raise UnsupportedError(
                "backward_passes_per_step above 1 cannot be combined with a LossScaleOptimizer (which "
                "mixed_float16 puts around an optimizer), whose scale may change between passes"
            )
        if self.fixed_scale is not None:
            return self.fixed_scale, False
        # where a LossScaleOptimizer keeps what changes
        state = self._optimizer._lookup_dependency("loss_scale")
        if state is None:
            raise UnsupportedError(
                "a LossScaleOptimizer(dynamic=False) around a DistributedOptimizer does not tell its scale: "
                "wrap the other way round, DistributedOptimizer(LossScaleOptimizer(optimizer, ...))"
            )
        return tf.convert_to_tensor(state.current_loss_scale), True


def _take_sums(helper: Any, gradients: Sequence[Any]) -> list[Any]:
    """Takes the sums of several passes out of Horovod's helper, which would not count anew after an error."""
    with tf.control_dependencies([gradient for gradient in gradients if gradient is not None]):
        sums = helper.locally_aggregated_grads.values()
        done = [helper.counter.assign(0), *(sum_.assign(tf.zeros_like(sum_)) for sum_ in sums)]
    with tf.control_dependencies([] if tf.executing_eagerly() else done):
        return [None if gradient is None else tf.identity(gradient) for gradient in gradients]


def _as_horovods(optimizer: Any, arguments: Arguments) -> Any:
    """Gives the optimizer the class of the copy that Horovod makes of its settings, and keeps its state."""
    made = _stock(optimizer, **arguments.taken_by(_stock))
    for name in vars(made).keys() - vars(optimizer).keys():
        object.__setattr__(optimizer, name, vars(made)[name])
    object.__setattr__(optimizer, "_name", made._name)
    object.__setattr__(optimizer, "__class__", type(made))
    return optimizer


def _with_state(optimizer: Any, keeper: StateKeeper, again: Again) -> Any:
    """Adds checkpoints, `from_config` and a check of gradients to the class that Horovod has made."""
    object.__setattr__(optimizer, "_horovod_sparse_keeper", keeper)
    object.__setattr__(optimizer, "horovod_sparse", CheckpointedState(keeper))
    # optimizers of the old kind do not find it by themselves
    optimizer._track_trackable(optimizer.horovod_sparse, name="horovod_sparse", overwrite=True)
    cls: Any = type(optimizer)
    base, apply = own_class(cls.__bases__[0]), cls.apply_gradients

    def apply_gradients(self: Any, grads_and_vars: Any, *more: Any, **named: Any) -> Any:
        pairs, reduction = list(grads_and_vars), self._allreduce_grads
        is_reduced, reduction.is_reduced = reduction.is_reduced, False
        alone = not reduction.synchronizer.is_needed or reduction.synchronizer.size == 1
        accumulates = self._agg_helper is not None
        if not (is_reduced or alone or accumulates or any(is_synchronized(one) for one, _ in pairs)):
            raise UnsupportedError(
                "apply_gradients was given gradients that nobody has reduced over ranks, which it does not "
                "do under tf-keras: call minimize(loss, variables, tape=...), or give what a "
                "DistributedGradientTape has made to a plain optimizer"
            )
        return apply(self, pairs, *more, **named)

    def refuse_local(_optimizer: Any, _variable: Any) -> None:
        raise no_local_variables()

    members = {name: item for name, item in vars(WithState).items() if name[:2] != "__"}
    if base is not cls.__bases__[0]:
        members["register_local_var"] = refuse_local
    members |= {
        "apply_gradients": functools.wraps(apply)(apply_gradients),
        # where Keras looks for the class that a saved model names; Horovod has none of that name
        "__module__": base.__module__,
        "__reduce__": lambda self: (again.from_config, (base, self.get_config())),
        "__deepcopy__": lambda self, memo: again.from_config(base, self.get_config()),
        "from_config": classmethod(lambda cls, config, **more: again.from_config(base, config, **more)),
    }
    for name, item in members.items():
        setattr(cls, name, item)
    return optimizer


@construction_errors.telling
def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **more: Any,
) -> Any:
    """As `DistributedOptimizer`, but the gradients of some layers stay local.

    Arguments and order are those of ``horovod.keras.PartialDistributedOptimizer``.

    Args:
        local_layers: a layer, or several; built already. All other arguments are those of
            `DistributedOptimizer`.
    """
    given = dict(locals())
    layers, more = checked_layers(given.pop("local_layers")), given.pop("more")
    if not all(layer.built for layer in layers):
        raise ArgumentError(
            "local_layers", local_layers, "layers that are built: they have no variables before"
        )
    wrapped = DistributedOptimizer(**given, **more)
    for layer in layers:
        for variable in layer.trainable_weights:
            wrapped.register_local_var(variable)
    return wrapped


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **arguments: Any,
) -> Any:
    """Loads a saved model, and wraps its optimizer, whose state is kept.

    Args:
        filepath: of the model.
        custom_optimizers: classes of optimizers that are not in Keras.
        custom_objects: names and classes that the file refers to.
        compression: see `DistributedOptimizer`.
        legacy_opts: accepted for Horovod's sake: the file knows which optimizer it holds.
        **arguments: more for `DistributedOptimizer`.

    Returns:
        A compiled model. Residuals start at zero under tf-keras; under Keras 3 a file that a rank saved
        has this rank's. From a SavedModel folder of tf-keras Keras restores the weights, and no state of the
        optimizer; so does this.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=known)
    model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **arguments)
    if is_keras3(model.optimizer) and str(filepath).endswith(".keras"):
        model.load_weights(filepath)  # with the residuals
    return model
