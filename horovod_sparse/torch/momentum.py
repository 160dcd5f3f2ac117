"""What a feedback that applies momentum, or learning rates, must know of PyTorch's optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horovod_sparse.feedback import MomentumCorrection, Recipe
from horovod_sparse.frontend.momentum import check_momentum

__all__ = ["refuse_double_momentum", "refuse_later_momentum"]

#: settings that only optimizers have which adapt to gradients: Adam and its kin, RMSprop, Adagrad, Rprop
_MOMENTS = {"betas", "eps", "etas"}


def refuse_double_momentum(recipe: Recipe, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses an optimizer that would apply momentum after momentum correction; see `check_momentum`.

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

    def of_optimizer() -> tuple[float, bool]:
        momenta = [group.get("momentum", 0.0) for group in param_groups]
        return max(momenta, default=0.0), any(_MOMENTS & set(group) for group in param_groups)

    check_momentum(recipe, of_optimizer)


def refuse_later_momentum(recipe: Recipe, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """As `refuse_double_momentum`, for what groups have come to have since: called in every step.

    A loaded checkpoint brings the momentum of the run that saved it, a schedule (``OneCycleLR``) sets one,
    and so may a group that is added.

    Args:
        recipe: of the compressor.
        param_groups: of the optimizer, as they are now.

    Raises:
        ArgumentError: see `refuse_double_momentum`.
    """
    if isinstance(recipe.feedback, MomentumCorrection) and any(
        group.get("momentum") for group in param_groups
    ):
        refuse_double_momentum(recipe, param_groups)
