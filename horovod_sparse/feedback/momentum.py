"""Momentum correction: what accumulates is the velocity, not the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from horovod_sparse.arrays.protocol import FoldReport
from horovod_sparse.checks import check_number
from horovod_sparse.feedback.base import (
    FoldableAccumulator,
    LearningRates,
    check_clip_norm,
    local_clip_norm,
    residual_decay,
)
from horovod_sparse.sparsifiers.base import BucketInfo

__all__ = ["MomentumCorrection"]

_BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclass(frozen=True)
class MomentumCorrection:
    """``u = m u + g,  acc = e + u``; sent positions are cleared in e and in u.

    With plain error feedback, a gradient that is held back for many steps misses the momentum it would
    have gathered. Here momentum is applied before, on every rank, so the optimizer must not apply it
    again: use SGD without momentum (with it an ArgumentError is raised). Weight decay stays with the
    optimizer, and so out of the velocity.

    It is nobody's default, not even of `DGC`, because it is right only together with a change of the
    user's optimizer, which a drop-in must not ask for.

    Args:
        momentum: m, in [0, 1).
        nesterov: ``acc = e + g + m u`` instead: what Nesterov's momentum of PyTorch's SGD adds.
        masking: clear the velocity where values were sent (momentum factor masking), so that stale
            momentum does not push on.
        clip_norm: largest L2 norm of a rank's gradient of a bucket, times sqrt(P); None for no clipping.
            Local clipping by ``clip_norm / sqrt(P)`` bounds the norm of the sum as global clipping by
            clip_norm would, if gradients of different ranks are independent.
        scale_residual: see `ErrorFeedback`; the velocity, made of gradients, is not scaled.

    Source: Lin et al., ICLR 2018 (DGC), Sections 3.1-3.3. Departure: clipping is by bucket, since a norm
    over all parameters is known only after the whole backward pass.

    Example:
        >>> MomentumCorrection(momentum=0.9).num_companions
        1
    """

    text_name: ClassVar[str] = "momentum"

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip_norm: float | None = None
    scale_residual: bool = False

    def __post_init__(self) -> None:
        check_number(
            "momentum", self.momentum, "a number in [0, 1)", low=0.0, high=_BELOW_ONE, include_low=True
        )
        check_clip_norm(self.clip_norm)

    @property
    def num_companions(self) -> int:
        """One: the velocity."""
        return 1

    def decay(self, learning_rates: LearningRates) -> float:
        """See `Feedback.decay`."""
        return residual_decay(self.scale_residual, learning_rates)

    def fold(
        self, accumulator: FoldableAccumulator, gradient: Any, info: BucketInfo, learning_rates: LearningRates
    ) -> FoldReport:
        """See `Feedback.fold`."""
        return accumulator.fold(
            gradient,
            decay=self.decay(learning_rates),
            momentum=self.momentum,
            nesterov=self.nesterov,
            masking=self.masking,
            clip_norm=local_clip_norm(self.clip_norm, info),
        )
