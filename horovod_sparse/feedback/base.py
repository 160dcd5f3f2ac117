"""What happens to a gradient before selection, and to what was not selected after it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from horovod_sparse.arrays.protocol import FoldReport
from horovod_sparse.checks import check_number
from horovod_sparse.sparsifiers.base import BucketInfo

__all__ = [
    "ErrorFeedback",
    "Feedback",
    "FoldableAccumulator",
    "LearningRates",
    "NoFeedback",
    "check_clip_norm",
    "local_clip_norm",
    "residual_decay",
]

#: of the previous step and of this one; None where unknown
LearningRates: TypeAlias = tuple[float | None, float | None]


class FoldableAccumulator(Protocol):
    """The part of an accumulator that a feedback uses."""

    def fold(
        self,
        gradient: Any,
        *,
        decay: float = 1.0,
        momentum: float | None = None,
        nesterov: bool = False,
        masking: bool = True,
        keep_residual: bool = True,
        clip_norm: float | None = None,
        low_pass: float | None = None,
    ) -> FoldReport:
        """See `HostAccumulator.fold`."""


@runtime_checkable
class Feedback(Protocol):
    """Turns a gradient and the residual into the accumulator, in one pass."""

    @property
    def num_companions(self) -> int:
        """Arrays of n elements that it needs beside the residual."""

    def decay(self, learning_rates: LearningRates) -> float:
        """What `fold` multiplies the residual by: thresholds have to follow it.

        Args:
            learning_rates: of the previous step and of this one; None where unknown.
        """

    def fold(
        self, accumulator: Any, gradient: Any, info: BucketInfo, learning_rates: LearningRates
    ) -> FoldReport:
        """Folds the gradient in and clears it.

        Args:
            accumulator: of the bucket.
            gradient: [n], zeros afterwards.
            info: the facts of the bucket.
            learning_rates: of the previous step and of this one; None where unknown.
        """


def residual_decay(scale_residual: bool, learning_rates: LearningRates) -> float:
    """What the residual is multiplied by: eta_before / eta_now, or 1.

    Example:
        >>> residual_decay(True, (0.1, 0.05)), residual_decay(True, (None, 0.05))
        (2.0, 1.0)
    """
    before, now = learning_rates
    # a rate of 0 (the first step of some warm-ups) has no quotient: what was held back is kept as it is
    return before / now if scale_residual and before and now else 1.0


def check_clip_norm(clip_norm: float | None) -> None:
    """Refuses what is no norm.

    Raises:
        ArgumentError: it is neither None nor a number above 0.
    """
    if clip_norm is not None:
        check_number("clip_norm", clip_norm, "a norm above 0, or None", low=0.0, high=math.inf)


def local_clip_norm(clip_norm: float | None, info: BucketInfo) -> float | None:
    """``clip_norm / sqrt(P)``: what one rank's gradient of the bucket may have.

    Example:
        >>> local_clip_norm(1.0, BucketInfo("w", 8, size=4))
        0.5
    """
    return None if clip_norm is None else clip_norm / math.sqrt(info.size)


@dataclass(frozen=True)
class ErrorFeedback:
    """What is not sent stays: ``acc = residual + gradient``, ``residual = acc - sent``.

    The papers fold the learning rate in (``acc = e + eta * G``); Horovod's optimizers receive
    gradients and multiply by eta later. The two are equal while eta is constant. When eta changes,
    old gradients are applied with the new learning rate, as the public programs do. `scale_residual`
    keeps the papers' form: the residual is multiplied by eta_before / eta_now, so that a gradient is
    always applied with the learning rate of the step that computed it.

    That form is for plain SGD alone. Momentum and adaptive moments outlive the step: what a falling rate
    has enlarged is in them still when the rate has come back, or spoils the estimate of a gradient's
    size. In no order of rates is the residual enlarged more than ten times (see `Progress.at`).

    Args:
        scale_residual: follow changes of the learning rate, as the papers' equations do; for optimizers
            without momentum or moments.
        clip_norm: of a rank's gradient of a bucket, times sqrt(P); None for no clipping. See
            `MomentumCorrection`.

    Source: Seide et al. 2014; ExDyna and MiCRO, Algorithm 1.

    Example:
        >>> ErrorFeedback().scale_residual
        False
    """

    text_name: ClassVar[str] = "error"

    scale_residual: bool = False
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_clip_norm(self.clip_norm)

    @property
    def num_companions(self) -> int:
        """None but the residual."""
        return 0

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
            clip_norm=local_clip_norm(self.clip_norm, info),
        )


@dataclass(frozen=True)
class NoFeedback:
    """What is not sent is lost: ``acc = gradient``. For comparison; it does not converge in general.

    Args:
        clip_norm: see `ErrorFeedback`.
    """

    text_name: ClassVar[str] = "none"

    clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_clip_norm(self.clip_norm)

    @property
    def num_companions(self) -> int:
        """None: not even a residual is carried on."""
        return 0

    def decay(self, learning_rates: LearningRates) -> float:
        """1: there is nothing to scale."""
        return 1.0

    def fold(
        self, accumulator: FoldableAccumulator, gradient: Any, info: BucketInfo, learning_rates: LearningRates
    ) -> FoldReport:
        """See `Feedback.fold`."""
        return accumulator.fold(
            gradient, keep_residual=False, clip_norm=local_clip_norm(self.clip_norm, info)
        )
