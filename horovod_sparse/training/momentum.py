"""Momentum and learning rates are applied once: by the feedback, or by the optimizer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import BestFeedback, ErrorFeedback, MomentumCorrection, Recipe
from horovod_sparse.sparsifiers.base import value_text

_log = logging.getLogger("horovod_sparse")

#: settings that only optimizers have which adapt to gradients: Adam and its kin, RMSprop, Adagrad, Ftrl
_MOMENTS = {"betas", "eps", "etas", "beta_1", "epsilon", "rho", "initial_accumulator_value"}

#: densities at which an element waits longer than a momentum of 0.9 remembers
_SPIKES_BELOW = 0.1


def refuse_double_momentum(
    recipe: Recipe, settings: Callable[[], Sequence[Mapping[str, Any]]], *, adopts: bool = False
) -> None:
    """Refuses momentum after momentum correction, and warns of what is made for plain SGD.

    Refused are steps, too, that are normalized already, where the front end has no optimizer apply them as
    they are (`adopts`).

    An optimizer with moments of another kind (Adam) is only warned of where the feedback corrects
    momentum: that is not DGC any more, but may be meant. So is a residual that follows the learning rate
    (`scale_residual`) where something outlives the step: the quotient of two rates then enters it. And so is
    momentum, of either kind, behind plain error feedback at low density.

    Example:
        >>> from horovod_sparse.feedback import recipe
        >>> refuse_double_momentum(recipe("dgc", feedback="momentum"), lambda: [{"lr": 0.1, "momentum": 0.9}])
        Traceback (most recent call last):
        horovod_sparse.errors.ArgumentError: momentum=0.9 is not allowed: give momentum=0 to the optimizer...
    """
    feedback = recipe.feedback
    if getattr(feedback, "applies_rate", False) and not adopts:
        raise UnsupportedError(
            f"feedback={value_text(feedback).removesuffix('()')!r} makes the optimizer's steps, which this "
            "front end does not apply: horovod_sparse.torch.DistributedOptimizer(torch.optim.AdamW(...)) and "
            "horovod_sparse.ddp.attach(model, ..., optimizer=torch.optim.AdamW(...)) do"
        )
    corrects, scales = isinstance(feedback, MomentumCorrection), getattr(feedback, "scale_residual", False)
    spikes = isinstance(feedback, ErrorFeedback) and recipe.sparsifier.density < _SPIKES_BELOW
    if not (corrects or scales or spikes):
        return
    groups = settings()
    momentum = max((float(group.get("momentum") or 0.0) for group in groups), default=0.0)
    has_moments = any(_MOMENTS & set(group) for group in groups)
    if isinstance(feedback, MomentumCorrection) and momentum:
        raise ArgumentError(
            "momentum",
            momentum,
            "momentum=0 to the optimizer, since the feedback "
            f"MomentumCorrection(momentum={feedback.momentum}) applies momentum before selection; "
            'or feedback="error" to the compression, to leave momentum to the optimizer',
        )
    if corrects and has_moments:
        _log.warning(
            "momentum correction is made for SGD without momentum; this optimizer smooths gradients itself"
        )
    if spikes and (momentum or has_moments):
        told = "moments" if has_moments else "momentum"
        _log.warning(
            "at density %g this optimizer's %s meet every element as a spike, and training is behind dense "
            "training (numbers: docs/results.md). Compression.best(density=%g) leaves them to the feedback",
            *(recipe.sparsifier.density, told, recipe.sparsifier.density),
        )
    if scales and (momentum or has_moments):
        _log.warning(
            "scale_residual=True is made for SGD without momentum: this optimizer remembers gradients longer "
            "than a step, and will remember what a falling learning rate has enlarged; leave it out"
        )


#: what makes the steps of which optimizers
_OPTIMIZERS = {"adam": "AdamW(...)", "rmsprop": "RMSprop(...)", "best": "AdamW(...), Adam, RMSprop or SGD"}


def feedback_for(feedback: Any, own: type | None, optimizer: type, momentum: float, library: str) -> Any:
    """The feedback behind which an optimizer leaves its work to it.

    Args:
        feedback: that was asked for.
        own: the one that makes such an optimizer's steps, or that of SGD; None for an optimizer without one.
        optimizer: its class.
        momentum: which it would have.
        library: whose optimizers these are, in words.

    Raises:
        ArgumentError: the feedback makes the steps of other optimizers.
    """
    if isinstance(feedback, BestFeedback) and own is not None:
        feedback = own(clip_norm=feedback.clip_norm)
    elif own is None or own is ErrorFeedback or not isinstance(feedback, own):
        name = getattr(feedback, "text_name", "")
        line = f"{library}.{_OPTIMIZERS.get(name, 'SGD')}, whose steps feedback={name!r} makes"
        raise ArgumentError("optimizer", optimizer.__name__, f"{line}; or feedback='error'")
    if momentum:
        _say_left_out(momentum)
    return feedback


@functools.cache
def _say_left_out(momentum: float) -> None:
    _log.warning(
        "momentum %g is left out, and the rate is lr / (1 - momentum): error feedback is a momentum itself",
        momentum,
    )


def refuse_later_momentum(recipe: Recipe, groups: Sequence[Mapping[str, Any]]) -> None:
    """As `refuse_double_momentum`, for what groups have come to have since: in every step of a correction.

    A loaded checkpoint brings the momentum of the run that saved it, a schedule (``OneCycleLR``) sets one,
    and so may a group that is added.
    """
    if any(group.get("momentum") for group in groups):
        refuse_double_momentum(recipe, lambda: groups)
