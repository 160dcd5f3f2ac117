"""Momentum and learning rates are applied once: by the feedback, or by the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import MomentumCorrection, Recipe

_log = logging.getLogger("horovod_sparse")


def check_momentum(recipe: Recipe, of_optimizer: Callable[[], tuple[float, bool]]) -> None:
    """Refuses momentum after momentum correction, and warns of what is made for plain SGD.

    An optimizer with moments of another kind (Adam) is only warned of where the feedback corrects
    momentum: that is not DGC any more, but may be meant. So is a residual that follows the learning rate
    (`scale_residual`) where something outlives the step: the quotient of two rates then enters it.

    Args:
        recipe: of the compressor.
        of_optimizer: gives its momentum (0 for none), and whether it adapts to gradients, as Adam, RMSprop
            and Adagrad do; asked only where that matters.

    Raises:
        ArgumentError: the optimizer has momentum, and the feedback is `MomentumCorrection`.

    Example:
        >>> from horovod_sparse.feedback import recipe
        >>> check_momentum(recipe("dgc", feedback="momentum"), lambda: (0.9, False))
        Traceback (most recent call last):
        horovod_sparse.errors.ArgumentError: momentum=0.9 is not allowed: give momentum=0 to the optimizer...
    """
    feedback = recipe.feedback
    corrects, scales = isinstance(feedback, MomentumCorrection), getattr(feedback, "scale_residual", False)
    if not (corrects or scales):
        return
    momentum, has_moments = of_optimizer()
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
    if scales and (momentum or has_moments):
        _log.warning(
            "scale_residual=True is made for SGD without momentum: this optimizer remembers gradients longer "
            "than a step, and will remember what a falling learning rate has enlarged; leave it out"
        )
