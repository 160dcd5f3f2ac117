"""Feedbacks by name."""

from __future__ import annotations

from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback.base import ErrorFeedback, Feedback, NoFeedback
from horovod_sparse.feedback.lowpass import LowPass
from horovod_sparse.feedback.momentum import MomentumCorrection

__all__ = ["FEEDBACKS", "feedback_named"]

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
