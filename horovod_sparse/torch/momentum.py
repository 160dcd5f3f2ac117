"""Momentum is applied once: by the feedback, or by the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import MomentumCorrection, Recipe

__all__ = ["refuse_double_momentum"]

_log = logging.getLogger("horovod_sparse")


def refuse_double_momentum(recipe: Recipe, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses an optimizer that would apply momentum after momentum correction has.

    An optimizer with moments of another kind (Adam) is only warned of: that is not DGC any more, but
    may be meant.

    Args:
        recipe: of the compressor.
        param_groups: of the optimizer.

    Raises:
        ArgumentError: a group has momentum, and the feedback is `MomentumCorrection`.

    Example:
        >>> from horovod_sparse.feedback import recipe
        >>> refuse_double_momentum(recipe("dgc", feedback="momentum"), [{"lr": 0.1, "momentum": 0.9}])
        Traceback (most recent call last):
        horovod_sparse.errors.ArgumentError: momentum=0.9 is not allowed: give momentum=0 to the optimizer...
    """
    if not isinstance(recipe.feedback, MomentumCorrection):
        return
    for group in param_groups:
        if given := group.get("momentum", 0.0):
            raise ArgumentError(
                "momentum",
                given,
                "momentum=0 to the optimizer, since the feedback "
                f"MomentumCorrection(momentum={recipe.feedback.momentum}) applies momentum before selection; "
                'or feedback="error" to the compression, to leave momentum to the optimizer',
            )
    if any("betas" in group for group in param_groups):
        _log.warning(
            "momentum correction is made for SGD without momentum; this optimizer smooths gradients itself"
        )
