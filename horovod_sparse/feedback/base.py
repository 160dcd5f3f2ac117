"""What happens to a gradient before selection, and to what was not selected after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from horovod_sparse.arrays.protocol import FoldReport
from horovod_sparse.errors import ArgumentError, UnknownNameError

__all__ = ["ErrorFeedback", "Feedback", "FoldableAccumulator", "NoFeedback"]


class FoldableAccumulator(Protocol):
    """The part of `Accumulator` that a feedback uses."""

    def fold(self, gradient: Any, *, decay: float = 1.0, keep_residual: bool = True) -> FoldReport:
        """See `Accumulator.fold`; without the residual, values = gradient."""


@runtime_checkable
class Feedback(Protocol):
    """Turns a gradient and the residual into the accumulator, in one pass."""

    @property
    def num_companions(self) -> int:
        """Arrays of n elements that it needs beside the residual."""

    def fold(
        self, accumulator: Any, gradient: Any, learning_rates: tuple[float | None, float | None]
    ) -> FoldReport:
        """Folds the gradient in and clears it.

        Args:
            accumulator: of the bucket.
            gradient: [n], zeros afterwards.
            learning_rates: of the previous step and of this one; None where unknown.
        """


@dataclass(frozen=True)
class ErrorFeedback:
    """What is not sent stays: ``acc = residual + gradient``, ``residual = acc - sent``.

    The papers fold the learning rate in (``acc = e + eta * G``); Horovod's optimizers receive
    gradients and multiply by eta later. The two are equal while eta is constant. When eta changes,
    `scale_residual` keeps the papers' form: the residual is multiplied by eta_before / eta_now, so
    that a gradient is always applied with the learning rate of the step that computed it. Without
    it (as the public programs do) old gradients are applied with the new learning rate.

    Args:
        scale_residual: follow changes of the learning rate, as the papers' equations do.

    Source: Seide et al. 2014; ExDyna and MiCRO, Algorithm 1.
    """

    scale_residual: bool = True
    num_companions: int = 0

    def fold(
        self,
        accumulator: FoldableAccumulator,
        gradient: Any,
        learning_rates: tuple[float | None, float | None],
    ) -> FoldReport:
        """See `Feedback.fold`."""
        before, now = learning_rates
        # a rate of 0 (the first step of some warm-ups) has no quotient: what was held back is kept as it is
        decay = before / now if self.scale_residual and before and now else 1.0
        return accumulator.fold(gradient, decay=decay)


@dataclass(frozen=True)
class NoFeedback:
    """What is not sent is lost: ``acc = gradient``. For comparison; it does not converge in general."""

    num_companions: int = 0

    def fold(
        self,
        accumulator: FoldableAccumulator,
        gradient: Any,
        learning_rates: tuple[float | None, float | None],
    ) -> FoldReport:
        """See `Feedback.fold`."""
        return accumulator.fold(gradient, keep_residual=False)


FEEDBACKS: dict[str, type] = {"error": ErrorFeedback, "none": NoFeedback}


def feedback_named(name: str | Feedback) -> Feedback:
    """A feedback by its name, or the feedback itself.

    Raises:
        UnknownNameError: there is no feedback of that name.
        ArgumentError: it is neither a name nor a feedback.

    Example:
        >>> feedback_named("none")
        NoFeedback(num_companions=0)
    """
    if isinstance(name, str):
        if name not in FEEDBACKS:
            raise UnknownNameError("feedback", name, FEEDBACKS)
        made: Feedback = FEEDBACKS[name]()
        return made
    if not isinstance(name, Feedback):
        raise ArgumentError("feedback", name, f"one of {', '.join(sorted(FEEDBACKS))}, or a Feedback")
    return name
