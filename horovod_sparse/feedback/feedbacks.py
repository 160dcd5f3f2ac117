"""What happens to a gradient before selection, and to what was not selected after it; three ways, by name."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from horovod_sparse.arrays import Accumulator, FoldReport, FoldRule
from horovod_sparse.checks import check_number
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.sparsifiers.base import BucketInfo

#: of the previous step and of this one; None where unknown
LearningRates: TypeAlias = tuple[float | None, float | None]


@runtime_checkable
class Feedback(Protocol):
    """Turns a gradient and the residual into the accumulator, in one pass.

    It may also have what those here have: `keeps_residual`, `for_dense` and `for_shards`.
    """

    @property
    def num_companions(self) -> int:
        """Arrays of n elements that it needs beside the residual."""

    def decay(self, learning_rates: LearningRates) -> float:
        """What `fold` multiplies the residual by: thresholds have to follow it."""

    def fold(
        self, accumulator: Accumulator, gradient: Any, info: BucketInfo, learning_rates: LearningRates
    ) -> FoldReport:
        """Folds the gradient in and clears it."""


class _Feedback:
    """What all feedbacks here do alike: clip a gradient, and let the residual follow the learning rate."""

    text_name: ClassVar[str]
    #: arrays of n elements that it needs beside the residual
    num_companions: ClassVar[int] = 0
    #: whether what is not sent is sent later
    keeps_residual: ClassVar[bool] = True

    clip_norm: float | None
    scale_residual: bool = False

    def __post_init__(self) -> None:
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, "a norm above 0, or None", low=0.0, high=math.inf)

    def decay(self, learning_rates: LearningRates) -> float:
        """What the residual is multiplied by: eta_before / eta_now, or 1.

        Example:
            >>> ErrorFeedback(scale_residual=True).decay((0.1, 0.05)), ErrorFeedback().decay((0.1, 0.05))
            (2.0, 1.0)
        """
        before, now = learning_rates
        # a rate of 0 (the first step of some warm-ups) has no quotient: what was held back is kept as it is
        return before / now if self.scale_residual and before and now else 1.0

    def fold(
        self, accumulator: Accumulator, gradient: Any, info: BucketInfo, learning_rates: LearningRates
    ) -> FoldReport:
        # of the sum over ranks; what one rank's gradient may have is less
        norm = None if self.clip_norm is None else self.clip_norm / math.sqrt(info.size)
        decay = self.decay(learning_rates)
        return accumulator.fold(gradient, FoldRule(decay=decay, clip_norm=norm, **self._own()))

    def _own(self) -> dict[str, Any]:
        """Arguments of `FoldRule` that this feedback alone gives."""
        return {}

    def for_dense(self) -> Any:
        """The feedback of a parameter that is sent whole."""
        return self

    def for_shards(self, count: int) -> Any:
        """The feedback of each of so many shards of a bucket: all of them together may have its norm."""
        if self.clip_norm is None:
            return self
        return dataclasses.replace(self, clip_norm=self.clip_norm / math.sqrt(count))  # type: ignore[type-var]


@dataclass(frozen=True)
class ErrorFeedback(_Feedback):
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


@dataclass(frozen=True)
class NoFeedback(_Feedback):
    """What is not sent is lost: ``acc = gradient``. For comparison; it does not converge in general.

    Args:
        clip_norm: see `ErrorFeedback`.
    """

    text_name: ClassVar[str] = "none"
    keeps_residual: ClassVar[bool] = False

    clip_norm: float | None = None

    def _own(self) -> dict[str, Any]:
        return {"keep_residual": False}


@dataclass(frozen=True)
class MomentumCorrection(_Feedback):
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
    num_companions: ClassVar[int] = 1  # the velocity

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip_norm: float | None = None
    scale_residual: bool = False

    def __post_init__(self) -> None:
        check_number(
            "momentum",
            self.momentum,
            "a number in [0, 1)",
            low=0.0,
            high=1.0,
            include_low=True,
            include_high=False,
        )
        super().__post_init__()

    def _own(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov, "masking": self.masking}

    def for_dense(self) -> MomentumCorrection:
        """Unmasked: a velocity that is cleared in every step would be none."""
        return dataclasses.replace(self, masking=False)


FEEDBACKS: dict[str, type] = {
    "error": ErrorFeedback,
    "momentum": MomentumCorrection,
    "none": NoFeedback,
}


def feedback_class(name: str) -> type:
    """The feedback of this name, not made yet."""
    if name == "lowpass":
        gone = "'error' with a smaller learning rate: the low-pass filter of the residual is no more"
        raise ArgumentError("feedback", name, gone)
    if name not in FEEDBACKS:
        raise UnknownNameError("feedback", name, FEEDBACKS)
    return FEEDBACKS[name]


def feedback_named(name: str | Feedback) -> Feedback:
    """A feedback by its name, or the feedback itself.

    Example:
        >>> feedback_named("momentum").momentum
        0.9
    """
    if isinstance(name, str):
        made: Feedback = feedback_class(name)()
        return made
    if not isinstance(name, Feedback) or isinstance(name, type):
        raise ArgumentError("feedback", name, f"one of {', '.join(sorted(FEEDBACKS))}, or a Feedback")
    return name
