"""Keras' optimizers where a feedback does a part of their work: they do the rest, under tf-keras, too."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import AdamFeedback, BestFeedback, ErrorFeedback, Recipe
from horovod_sparse.tensorflow.tensors import as_variable

#: settings by which gradients would be changed that are steps, or which change what the second moment is
_REFUSED = {
    "amsgrad": "False",
    "clipnorm": "None, and clip_norm to the feedback",
    "global_clipnorm": "None, and clip_norm to the feedback",
    "clipvalue": "None, and clip_norm to the feedback",
    "gradient_accumulation_steps": "None, and backward_passes_per_step to the DistributedOptimizer",
}


def adopted_class(optimizer: Any, recipe: Recipe) -> tuple[type, Recipe]:
    """The class that an optimizer is to have behind a recipe, and the recipe for it.

    Its own class, where the recipe leaves an optimizer's work to it.

    Raises:
        ArgumentError: the feedback does a part of the work of another optimizer than this.
    """
    feedback, kind = recipe.feedback, own_class(type(optimizer))
    if not getattr(feedback, "applies_rate", False):
        return kind, recipe
    known = tf.keras.optimizers
    if isinstance(feedback, BestFeedback) and kind is known.SGD:
        chosen: Any = ErrorFeedback(clip_norm=feedback.clip_norm)
        if not optimizer.momentum:
            return kind, dataclasses.replace(recipe, feedback=chosen)
    elif kind in (known.Adam, known.AdamW):
        chosen = (
            AdamFeedback(clip_norm=feedback.clip_norm) if isinstance(feedback, BestFeedback) else feedback
        )
        chosen = chosen.for_group(
            {"betas": (optimizer.beta_1, optimizer.beta_2), "eps": float(optimizer.epsilon)}
        )
    else:
        allowed = "keras.optimizers.AdamW(...), whose steps this feedback makes, or feedback='error'"
        raise ArgumentError("optimizer", kind.__name__, allowed)
    for name, allowed in _REFUSED.items():
        if getattr(optimizer, name, None):
            raise ArgumentError(name, getattr(optimizer, name), allowed)
    return _without_moments(kind, kind is known.SGD), dataclasses.replace(recipe, feedback=chosen)


def own_class(kind: Any) -> Any:
    """The user's, of one that `adopted_class` has given."""
    return vars(kind).get("_horovod_sparse_base", kind)


def no_local_variables() -> UnsupportedError:
    """For variables that are each rank's own, whose gradients no feedback sees."""
    return UnsupportedError(
        "local variables cannot be combined with a feedback that makes the optimizer's steps: give "
        "feedback='error', or the local variables an optimizer of their own"
    )


def _without_moments(base: Any, is_sgd: bool) -> Any:
    """``theta = theta (1 - rate weight_decay) - step``; the decay, schedules and averages are the base's own.

    Of Adam what a gradient holds is the step. SGD goes at ``rate / (1 - momentum)``, which goes as far: error
    feedback is a momentum. Moments that there are already stay, and nothing asks for them.
    """
    makes_moments = next(one for one in base.__mro__ if "build" in vars(one))

    class WithoutMoments(base):
        _horovod_sparse_base = base

        def build(self, variables: Any) -> None:
            super(makes_moments, self).build(variables)
            self._built = True  # asked for by tf-keras

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any = None) -> None:
            own = as_variable(variable)
            step = tf.cast(gradient, own.dtype)
            if is_sgd:
                rate = self.learning_rate if learning_rate is None else learning_rate
                step *= tf.cast(as_variable(rate), own.dtype) / (1.0 - self.momentum)
            own.assign_sub(step)

    WithoutMoments.__name__, WithoutMoments.__qualname__ = base.__name__, base.__qualname__
    WithoutMoments.__module__, WithoutMoments.__doc__ = base.__module__, base.__doc__
    return WithoutMoments
