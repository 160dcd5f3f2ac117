"""Momentum correction: what accumulates is the velocity, not the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from horovod_sparse.arrays.protocol import FoldReport
from horovod_sparse.errors import ArgumentError
from horovod_sparse.sparsifiers.base import BucketInfo, check_number

__all__ = ["MomentumCorrection"]


@dataclass(frozen=True)
class MomentumCorrection:
    """``u = m u + g,  acc = e + u``; sent positions are cleared in e and in u.

    With plain error feedback, a gradient that is held back for many steps misses the momentum it would
    have gathered. Here momentum is applied before, on every rank, so the optimizer must not apply it
    again: use SGD without momentum. Weight decay stays with the optimizer, and so out of the velocity.

    Args:
        momentum: m, in [0, 1).
        nesterov: ``acc = e + g + m u`` instead.
        masking: clear the velocity where values were sent (momentum factor masking), so that stale
            momentum does not push on.
        clip_norm: largest L2 norm of a rank's gradient of a bucket, times sqrt(P); None for no clipping.
            Local clipping by ``clip_norm / sqrt(P)`` bounds the norm of the sum as global clipping by
            clip_norm would, if gradients of different ranks are independent.
        scale_residual: see `ErrorFeedback`.

    Source: Lin et al., ICLR 2018 (DGC), Sections 3.1-3.3. Departure: clipping is by bucket, since a norm
    over all parameters is known only after the whole backward pass.

    Example:
        >>> MomentumCorrection(momentum=0.9).num_companions
        1
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip_norm: float | None = None
    scale_residual: bool = True
    num_companions: int = 1

    def __post_init__(self) -> None:
        check_number("momentum", self.momentum, "a number in [0, 1)", low=0.0, high=1.0, include_low=True)
        if self.momentum == 1.0:
            raise ArgumentError("momentum", self.momentum, "a number in [0, 1)")
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, "a norm above 0, or None", low=0.0, high=math.inf)

    def fold(
        self,
        accumulator: Any,
        gradient: Any,
        info: BucketInfo,
        learning_rates: tuple[float | None, float | None],
    ) -> FoldReport:
        """See `Feedback.fold`."""
        before, now = learning_rates
        decay = before / now if self.scale_residual and before and now else 1.0
        limit = None if self.clip_norm is None else self.clip_norm / math.sqrt(info.size)
        report: FoldReport = accumulator.fold(
            gradient, decay=decay, momentum=self.momentum, nesterov=self.nesterov, clip_norm=limit
        )
        return report
