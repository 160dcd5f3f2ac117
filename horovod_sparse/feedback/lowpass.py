"""A low-pass filter of the residual: what is held back joins the selection bit by bit."""

from __future__ import annotations

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

__all__ = ["LowPass"]


@dataclass(frozen=True)
class LowPass:
    """``acc = m + g,  m = (1 - beta) m + beta (acc - sent)``: a residual that takes up gradients by parts.

    What has waited for many steps then comes in portions, not all at once, which keeps CLT-k from diverging
    at large learning rates; at small ones it only waits longer (docs/algorithms.md has numbers). beta = 1 is
    plain error feedback, bit for bit.

    Nothing is lost. Kept is ``s = sum of gradients - sum of what was sent``, of which ``m = beta s`` takes
    part: a gradient that is not sent at once waits longer, the smaller beta is, but it waits. So s is what a
    rank holds back, what norms in the telemetry speak of, and what is kept when buckets or ranks change. It
    costs n more elements of memory, as a velocity does.

    In a checkpoint s is the entry in "companions"; "residuals" has the last step's acc where nothing was
    sent, which the next step forgets.

    Args:
        beta: part of what is held back that joins the next gradient, in (0, 1].
        clip_norm: of a rank's gradient of a bucket, times sqrt(P); None for no clipping. See
            `MomentumCorrection`.
        scale_residual: see `ErrorFeedback`; here it is s that follows the learning rate.

    Source: ScaleCom (Chen et al., NeurIPS 2020), Algorithm 1. Departures: it may stand around any sparsifier;
    the learning rate stays with the optimizer.

    Example:
        >>> from horovod_sparse.feedback import parse_recipe
        >>> parse_recipe("cltk:density=0.01,feedback=lowpass(beta=0.1)").feedback == LowPass(beta=0.1)
        True
    """

    text_name: ClassVar[str] = "lowpass"

    beta: float = 0.1
    clip_norm: float | None = None
    scale_residual: bool = False

    def __post_init__(self) -> None:
        check_number("beta", self.beta, "a part in (0, 1]", low=0.0, high=1.0)
        check_clip_norm(self.clip_norm)

    @property
    def num_companions(self) -> int:
        """One: what is held back, unfiltered."""
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
            low_pass=self.beta,
            clip_norm=local_clip_norm(self.clip_norm, info),
        )
