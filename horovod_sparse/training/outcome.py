"""What becomes of a step: applied, skipped, left to a loss scaler, or an error.

Whatever is done is done by all ranks alike: each has seen the marks of all others, in messages that it gets
anyway.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from horovod_sparse.errors import EditedGradientError, NonFiniteGradientError
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.training.settings import RAISE

Failure = TypeVar("Failure", bound=BaseException)

_log = logging.getLogger("horovod_sparse")


class Outcome(enum.IntEnum):
    """The end of a step; no rank applies it unless all do."""

    APPLIED = 0
    SKIPPED = 1
    #: a loss scaler shall find Inf in the gradients of every rank
    OVERFLOW = 2
    #: every rank raises the error
    RAISE = 3


@dataclass(frozen=True)
class Verdict:
    """The end of a step, on all ranks, and why; with `drop` gradients leave the residuals."""

    outcome: Outcome
    error: BaseException | None = None
    drop: bool = False


class NonFinitePolicy:
    """Decides what happens to a step with gradients that are not finite on some rank.

    * "raise": `NonFiniteGradientError` on every rank. Nothing is applied.
    * "skip": nothing is applied, and nothing raised: no rank's optimizer steps.

    A step that no rank applies is given up whole: residuals are what they were before it. So is a sum that
    overflows though every gradient is finite.
    """

    def __init__(self, on_nonfinite: str, telemetry: Telemetry) -> None:
        self.on_nonfinite, self._telemetry = on_nonfinite, telemetry

    def judge(
        self,
        errors: Sequence[BaseException],
        *,
        scaled: bool = False,
        failure: BaseException | None = None,
    ) -> Verdict:
        """Returns the verdict on a step, and counts it if it is skipped."""
        if not errors and failure is None:
            return Verdict(Outcome.APPLIED)
        error = worst(errors) if failure is None else failure
        # known to all ranks alike; after an edit the gradient is not what was folded in
        drop = isinstance(error, NonFiniteGradientError)
        if scaled and drop:
            return Verdict(Outcome.OVERFLOW, error, drop)
        return Verdict(Outcome.SKIPPED if self._skips(errors) else Outcome.RAISE, error, drop)

    def _skips(self, errors: Sequence[BaseException]) -> bool:
        if self.on_nonfinite == RAISE or not errors:
            return False
        findings = [error.finding for error in errors if isinstance(error, NonFiniteGradientError)]
        if len(findings) < len(errors):
            return False
        count = self._telemetry.num_skipped = self._telemetry.num_skipped + 1
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, ...: a training that has blown up fills no disk
            words = "%s; all ranks skip this step, as on_nonfinite='skip' asks (%d so far)"
            _log.warning(words, findings[0], count)
        return True


def worst(failures: Iterable[Failure]) -> Failure:
    """Returns the error of a step to look at: one that stands on this rank alone, or else an edit."""
    kinds = (EditedGradientError, NonFiniteGradientError)
    return min(failures, key=lambda error: 1 + kinds.index(type(error)) if type(error) in kinds else 0)
