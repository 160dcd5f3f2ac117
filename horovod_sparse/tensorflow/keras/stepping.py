"""Keras' optimizers whose step is an exchange: which rule makes it, and what is left to Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import RULES, Recipe
from horovod_sparse.feedback.rules import with_rule
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.arguments import Arguments
from horovod_sparse.tensorflow.keras.steps import KerasSteps
from horovod_sparse.training.schedules import Schedule

_CLIPPING = "None, and clip before apply_gradients, or give clip_norm to the feedback"
#: settings that change gradients within Keras' optimizers, and what else to do
_REFUSED = {
    "clipnorm": _CLIPPING,
    "global_clipnorm": _CLIPPING,
    "clipvalue": _CLIPPING,
    "gradient_accumulation_steps": "None, and backward_passes_per_step to the DistributedOptimizer",
}


def own_class(kind: Any) -> Any:
    """Returns the user's class behind one whose step is an exchange."""
    return vars(kind).get("_horovod_sparse_base", kind)


def no_local_variables() -> UnsupportedError:
    """Refuses variables that are each rank's own: no feedback sees their gradients."""
    return UnsupportedError(
        "local variables cannot be combined with a feedback that makes the optimizer's steps: give "
        "feedback='error', or the local variables an optimizer of their own"
    )


def recipe_for(optimizer: Any, recipe: Recipe) -> Recipe:
    """Returns a recipe with the rule of an optimizer of Keras; refuses what the rule does not follow."""
    kind = type(optimizer)
    rules: dict[Any, Any] = {
        getattr(tf.keras.optimizers, name): rule for rule in RULES for name in rule.keras
    }
    if kind not in rules:
        names = ", ".join(sorted({one.__name__ for one in rules}))
        allowed = f"{names} of keras.optimizers itself, whose steps are known; or feedback='error'"
        raise ArgumentError("optimizer", kind.__name__, allowed)
    own = rules[kind]
    for name, allowed in _REFUSED.items():
        if getattr(optimizer, name, None):
            raise ArgumentError(name, getattr(optimizer, name), allowed)
    settings = {name: getattr(optimizer, name, 0.0) for name in ("momentum", "nesterov", *own.refused)}
    return with_rule(recipe, own, kind.__name__, [settings])


def bound(optimizer: Any, arguments: Arguments) -> KerasSteps:
    """Returns the passes of an optimizer, which leaves its variables to them from now on."""
    recipe, settings = recipe_for(optimizer, arguments.compression.recipe), arguments.settings
    for name in ("merging", "tensor_selection", "profile"):
        if (given := getattr(settings, name)) is not None:
            allowed = "None: this feedback exchanges steps; feedback='error' exchanges gradients"
            raise ArgumentError(name, given, allowed)
    passes = arguments.backward_passes_per_step
    if passes > 1 and not hasattr(optimizer, "stateless_apply"):  # Horovod's helper skips `apply_gradients`
        raise ArgumentError("backward_passes_per_step", passes, "1 with this feedback under tf-keras")
    if settings.levels != "flat":
        raise ArgumentError("levels", settings.levels, "'flat' with this feedback")
    if arguments.op != hvd.Average:
        raise ArgumentError("op", arguments.op, "Average: this feedback averages steps")
    arguments.compression.serve(optimizer, recipe)
    schedule = Schedule(arguments.every, arguments.delay)
    steps = KerasSteps(optimizer, recipe, settings, schedule, arguments.process_set, arguments.groups)
    arguments.compression._horovod_sparse_keeper.attach(steps)
    object.__setattr__(optimizer, "_horovod_sparse_steps", steps)
    object.__setattr__(optimizer, "__class__", _without_update(type(optimizer)))
    return steps


def _without_update(base: Any) -> Any:
    """Returns Keras' class without its update of variables; it still counts, averages, constrains."""

    class Still(base):
        _horovod_sparse_base = base
        _horovod_sparse_steps: KerasSteps | None = None

        def update_step(self, gradient: Any, variable: Any, *rate: Any) -> None:
            """Does nothing: the pass has moved the variable."""

        def _apply_weight_decay(self, variables: Any) -> None:
            """Does nothing: the pass shrinks variables."""

        apply_weight_decay = _apply_weight_decay

        def save_own_variables(self, store: Any) -> None:
            if self._horovod_sparse_steps is not None:
                self._horovod_sparse_steps.give_slots()
            super().save_own_variables(store)

        def load_own_variables(self, store: Any) -> None:
            super().load_own_variables(store)
            if self._horovod_sparse_steps is not None:
                self._horovod_sparse_steps.take_slots()

    Still.__name__, Still.__qualname__ = base.__name__, base.__qualname__
    Still.__module__, Still.__doc__ = base.__module__, base.__doc__
    return Still
