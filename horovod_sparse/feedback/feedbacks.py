"""What happens to a gradient before selection, and to what was not selected after it; four ways, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from horovod_sparse.arrays.protocol import Accumulator, FoldReport
from horovod_sparse.checks import check_number
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.sparsifiers.base import BucketInfo

#: of the previous step and of this one; None where unknown
LearningRates: TypeAlias = tuple[float | None, float | None]


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
        self, accumulator: Accumulator, gradient: Any, info: BucketInfo, learning_rates: LearningRates
    ) -> FoldReport:
        """Folds the gradient in and clears it.

        Args:
            accumulator: of the bucket.
            gradient: [n], zeros afterwards.
            info: the facts of the bucket.
            learning_rates: of the previous step and of this one; None where unknown.
        """


class _Feedback:
    """What all feedbacks here do alike: clip a gradient, and let the residual follow the learning rate."""

    text_name: ClassVar[str]
    #: arrays of n elements that it needs beside the residual
    num_companions: ClassVar[int] = 0

    clip_norm: float | None
    scale_residual: bool = False

    def __post_init__(self) -> None:
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, "a norm above 0, or None", low=0.0, high=math.inf)

    def decay(self, learning_rates: LearningRates) -> float:
        """What the residual is multiplied by: eta_before / eta_now, or 1; see `Feedback.decay`.

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
        """See `Feedback.fold`."""
        # of the sum over ranks; what one rank's gradient may have is less
        norm = None if self.clip_norm is None else self.clip_norm / math.sqrt(info.size)
        decay = self.decay(learning_rates)
        return accumulator.fold(gradient, decay=decay, clip_norm=norm, **self._own())

    def _own(self) -> dict[str, Any]:
        """Arguments of `Accumulator.fold` that this feedback alone gives."""
        return {}


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

    clip_norm: float | None = None

    def _own(self) -> dict[str, Any]:
        return {"keep_residual": False}


@dataclass(frozen=True)
class LowPass(_Feedback):
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
    num_companions: ClassVar[int] = 1  # what is held back, unfiltered

    beta: float = 0.1
    clip_norm: float | None = None
    scale_residual: bool = False

    def __post_init__(self) -> None:
        check_number("beta", self.beta, "a part in (0, 1]", low=0.0, high=1.0)
        super().__post_init__()

    def _own(self) -> dict[str, Any]:
        return {"low_pass": self.beta}


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


FEEDBACKS: dict[str, type] = {
    "error": ErrorFeedback,
    "lowpass": LowPass,
    "momentum": MomentumCorrection,
    "none": NoFeedback,
}


def feedback_named(name: str | Feedback) -> Feedback:
    """A feedback by its name, or the feedback itself.

    Raises:
        UnknownNameError: there is no feedback of that name.
        ArgumentError: it is neither a name nor a feedback.

    Example:
        >>> feedback_named("momentum").momentum
        0.9
    """
    if isinstance(name, str):
        if name not in FEEDBACKS:
            raise UnknownNameError("feedback", name, FEEDBACKS)
        made: Feedback = FEEDBACKS[name]()
        return made
    if not isinstance(name, Feedback) or isinstance(name, type):
        raise ArgumentError("feedback", name, f"one of {', '.join(sorted(FEEDBACKS))}, or a Feedback")
    return name
