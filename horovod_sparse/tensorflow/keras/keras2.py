"""Optimizers of Keras 2 (tf-keras): Horovod's own wrapper, with our reduction in its place."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.errors import UnsupportedError
from horovod_sparse.tensorflow.arguments import Again
from horovod_sparse.tensorflow.graph import is_synchronized
from horovod_sparse.tensorflow.keras.stepping import no_local_variables, own_class
from horovod_sparse.tensorflow.private import refuse_copies, scaler_of
from horovod_sparse.tensorflow.reduction import Reduction
from horovod_sparse.tensorflow.state import CheckpointedState, StateKeeper, WithState
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer


class _Reduce:
    """Called by Horovod's optimizers, and by their helpers that add up several passes."""

    def __init__(self, optimizer: Any, synchronizer: GradientSynchronizer) -> None:
        self._optimizer, self.synchronizer = optimizer, synchronizer
        #: whether gradients have been reduced that no step has applied
        self.is_reduced = False
        #: the LossScaleOptimizer around this one, if there is any
        self.scaler: Callable[[], Any] = lambda: None

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Any], vars: Sequence[Any] = (), **_names: Any) -> list[Any]:
        rate, scaler = _learning_rate(self._optimizer), self.scaler()
        if (helper := self._optimizer._agg_helper) is not None:
            grads = _emptied(helper, grads)
        if scaler is None:
            sums = self.synchronizer.synchronize(grads, vars, rate)
        else:
            # a fixed scale lets nothing be skipped, on any rank
            reduction = Reduction(self.synchronizer, scale_local=False)
            sums = reduction.reduce_if_finite(grads, vars, rate, scaler.loss_scale, scaler.dynamic)
        self.is_reduced = True
        return sums

    def scaled_by(self, scaler: Any) -> None:
        """Says which LossScaleOptimizer has been put around this one: gradients are its, not the loss'."""
        if self._optimizer._agg_helper is not None:
            raise UnsupportedError(
                "backward_passes_per_step above 1 cannot be combined with a LossScaleOptimizer (which "
                "mixed_float16 puts around an optimizer), whose scale may change between passes"
            )
        self.synchronizer.replanning.refuse("a LossScaleOptimizer")
        self.scaler = weakref.ref(scaler)


def adopted(optimizer: Any, wrapped: Any) -> Any:
    """The optimizer itself, with what Horovod's copy of it, made of its settings, has besides."""
    for name in vars(wrapped).keys() - vars(optimizer).keys():
        object.__setattr__(optimizer, name, vars(wrapped)[name])
    object.__setattr__(optimizer, "_name", wrapped._name)
    object.__setattr__(optimizer, "__class__", type(wrapped))
    return optimizer


def attach(wrapped: Any, synchronizer: GradientSynchronizer, keeper: StateKeeper, again: Again) -> Any:
    """Puts a sparse reduction into what Horovod has made of an optimizer; all else stays Horovod's."""
    if not hasattr(wrapped, "_allreduce_grads"):
        raise UnsupportedError(f"{type(wrapped).__name__} is no optimizer that Horovod can wrap")
    reduce = _Reduce(wrapped, synchronizer)
    helper = wrapped._agg_helper
    # past Keras' own __setattr__, which follows what it is given
    object.__setattr__(wrapped, "_allreduce_grads", reduce)
    if helper is not None:
        helper.allreduce_grads = reduce
    object.__setattr__(wrapped, "_horovod_sparse_keeper", keeper)
    state = CheckpointedState(keeper)
    object.__setattr__(wrapped, "horovod_sparse", state)
    # optimizers of the old kind do not find it by themselves
    wrapped._track_trackable(state, name="horovod_sparse", overwrite=True)

    cls: Any = type(wrapped)
    base: Any = own_class(cls.__bases__[0])
    if base is not cls.__bases__[0]:
        cls.register_local_var = _no_local_variables
    # where Keras looks for the class that a saved model names; in Horovod there is none of that name
    cls.__module__ = base.__module__
    # what a LossScaleOptimizer sets on the optimizer that it takes: nothing else tells of it
    cls._is_wrapped_by_loss_scale_optimizer = property(_is_scaled, _scaled)
    for name, item in vars(WithState).items():
        if name[:2] != "__":
            setattr(cls, name, item)
    cls.apply_gradients = _applying(cls.apply_gradients)
    cls.get_config = _config_of(cls.get_config)
    cls.__reduce__ = lambda self: (again.from_config, (base, self.get_config()))
    cls.__deepcopy__ = lambda self, memo: again.from_config(base, self.get_config())
    cls.from_config = classmethod(lambda cls, config, **more: again.from_config(base, config, **more))
    return wrapped


def _no_local_variables(_optimizer: Any, _variable: Any) -> None:
    raise no_local_variables()


def _applying(method: Callable[..., Any]) -> Callable[..., Any]:
    """`apply_gradients`, which Horovod's optimizers reduce nothing in: `minimize` computes and reduces."""

    @functools.wraps(method)
    def apply_gradients(self: Any, grads_and_vars: Any, *more: Any, **named: Any) -> Any:
        pairs, reduce = list(grads_and_vars), self._allreduce_grads
        alone = not reduce.synchronizer.is_needed or reduce.synchronizer.size == 1
        waits = self._agg_helper is not None  # for the last of several passes
        was_reduced, reduce.is_reduced = reduce.is_reduced, False
        if not (was_reduced or alone or waits or any(is_synchronized(one) for one, _ in pairs)):
            raise UnsupportedError(
                "apply_gradients was given gradients that nobody has reduced over ranks, which it does not "
                "do under tf-keras: call minimize(loss, variables, tape=...), or give what a "
                "DistributedGradientTape has made to a plain optimizer"
            )
        return method(self, pairs, *more, **named)

    return apply_gradients


def _config_of(method: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """`get_config`, which is also called where a model is copied through a file."""
    model = tf.keras.Model

    def get_config(self: Any) -> dict[str, Any]:
        refuse_copies(model.__deepcopy__, model.__reduce__)
        return method(self)

    return get_config


def _emptied(helper: Any, gradients: Sequence[Any]) -> list[Any]:
    """Takes the sums of several passes out of Horovod's helper, which would not count anew after an error."""
    with tf.control_dependencies([gradient for gradient in gradients if gradient is not None]):
        sums = helper.locally_aggregated_grads.values()
        done = [helper.counter.assign(0), *(sum_.assign(tf.zeros_like(sum_)) for sum_ in sums)]
    with tf.control_dependencies([] if tf.executing_eagerly() else done):
        return [None if gradient is None else tf.identity(gradient) for gradient in gradients]


def _is_scaled(optimizer: Any) -> bool:
    return optimizer._allreduce_grads.scaler() is not None


def _scaled(optimizer: Any, _value: bool) -> None:
    optimizer._allreduce_grads.scaled_by(scaler_of(optimizer))


def _learning_rate(optimizer: Any) -> Any:
    """Returns the rate of this step, or None; asks a schedule in the graph."""
    rate = getattr(optimizer, "learning_rate", None)
    if callable(rate) and not hasattr(rate, "dtype"):
        return rate(optimizer.iterations)
    return rate
