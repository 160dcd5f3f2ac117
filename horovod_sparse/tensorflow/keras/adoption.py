"""Keras' optimizers where a feedback does a part of their work: they do the rest, under tf-keras, too."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import RULES, ErrorFeedback, Recipe
from horovod_sparse.tensorflow.tensors import as_variable
from horovod_sparse.tensorflow.training import VariablesTraining
from horovod_sparse.training.compression import feedback_for

#: settings by which gradients would be changed that are steps, or which change what the second moment is
_REFUSED = {
    "amsgrad": "False",
    "centered": "False",
    "clipnorm": "None, and clip_norm to the feedback",
    "global_clipnorm": "None, and clip_norm to the feedback",
    "clipvalue": "None, and clip_norm to the feedback",
    "gradient_accumulation_steps": "None, and backward_passes_per_step to the DistributedOptimizer",
}


def adopted_class(optimizer: Any, recipe: Recipe) -> tuple[type, Recipe]:
    """The class that an optimizer is to have behind a recipe, and the recipe for it.

    Its own, where the recipe leaves no work to it. An error, where it leaves that of another optimizer.
    """
    feedback, kind = recipe.feedback, own_class(type(optimizer))
    if not feedback.applies_rate:
        return kind, recipe
    known, momentum = tf.keras.optimizers, getattr(optimizer, "momentum", 0.0)
    rules: dict[Any, type] = {getattr(known, name): rule for rule in RULES for name in rule.keras}
    own = ErrorFeedback if kind is known.SGD else rules.get(kind)
    chosen, is_sgd = feedback_for(feedback, own, kind, momentum, "keras.optimizers"), kind is known.SGD
    if is_sgd and not momentum:
        return kind, dataclasses.replace(recipe, feedback=chosen)
    for name, allowed in _REFUSED.items():
        if getattr(optimizer, name, None):
            raise ArgumentError(name, getattr(optimizer, name), allowed)
    if not is_sgd:
        chosen = chosen.of_keras(optimizer)
    return _without_moments(kind, is_sgd), dataclasses.replace(recipe, feedback=chosen)


def own_class(kind: Any) -> Any:
    """Returns the user's class behind one of `adopted_class`."""
    return vars(kind).get("_horovod_sparse_base", kind)


def no_local_variables() -> UnsupportedError:
    """Refuses variables that are each rank's own: no feedback sees their gradients."""
    return UnsupportedError(
        "local variables cannot be combined with a feedback that makes the optimizer's steps: give "
        "feedback='error', or the local variables an optimizer of their own"
    )


def _without_moments(base: Any, is_sgd: bool) -> Any:
    """``theta = theta (1 - rate weight_decay) - step``; the decay, schedules and averages are the base's own.

    Of all but SGD what a gradient holds is the step. Where there was a momentum it is divided by ``1 -
    momentum``, which goes as far: error feedback is one. SGD keeps its own for plans that leave all gradients
    dense. Moments of others that there are already stay, and nothing asks for them.
    """
    makes_moments = next(one for one in base.__mro__ if "build" in vars(one))

    class WithoutMoments(base):
        _horovod_sparse_base = base
        _horovod_sparse_training: VariablesTraining
        _keeps_momentum = False

        def build(self, variables: Any) -> None:
            before: Any = WithoutMoments if is_sgd else makes_moments
            super(before, self).build(variables)
            self._built = True  # asked for by tf-keras

        def update_step(self, gradient: Any, variable: Any, *rate: Any) -> None:
            before, whole = self._keeps_momentum, is_sgd and not self._horovod_sparse_training.plan.buckets
            self._keeps_momentum = whole
            if whole:
                super().update_step(gradient, variable, *rate)
                return
            if before:
                with tf.init_scope():  # a momentum of dense gradients that were long ago
                    for momentum in map(as_variable, self.momentums):
                        momentum.assign(tf.zeros_like(momentum))
            own = as_variable(variable)
            step = tf.cast(gradient, own.dtype)
            if is_sgd:
                step *= tf.cast(as_variable(rate[0] if rate else self.learning_rate), own.dtype)
            own.assign_sub(step / (1.0 - getattr(self, "momentum", 0.0)))

    WithoutMoments.__name__, WithoutMoments.__qualname__ = base.__name__, base.__qualname__
    WithoutMoments.__module__, WithoutMoments.__doc__ = base.__module__, base.__doc__
    return WithoutMoments
