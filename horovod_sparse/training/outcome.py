"""What becomes of a step: applied, carried out once more, skipped, left to a loss scaler, or an error.

Whatever is done is done by all ranks alike: each has seen the marks of all others, in messages that it gets
anyway.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from horovod_sparse.errors import EditedGradientError, NonFiniteGradientError
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.training.settings import RAISE, ZERO

Failure = TypeVar("Failure", bound=BaseException)

_log = logging.getLogger("horovod_sparse")


class Outcome(enum.IntEnum):
    """What becomes of a step."""

    APPLIED = 0
    #: all ranks take it back, and those without a bad gradient send once more what is in their residuals
    AGAIN = 1
    #: no rank applies it
    SKIPPED = 2
    #: no rank applies it, and a loss scaler shall find Inf in the gradients of every rank
    OVERFLOW = 3
    #: no rank applies it, and every rank raises the error
    RAISE = 4


@dataclass(frozen=True)
class Verdict:
    """What becomes of a step, on all ranks, and why; `drop`: this rank's gradients leave its residuals."""

    outcome: Outcome
    error: BaseException | None = None
    drop: bool = False


class NonFinitePolicy:
    """What one training does about gradients that are not finite on some rank.

    * "raise": `NonFiniteGradientError` on every rank. Nothing is applied.
    * "skip": nothing is applied, and nothing raised: no rank's optimizer steps.
    * "zero": the ranks that have such a gradient drop all of it, and the step is carried out once more: the
      others' gradients wait in their residuals. A good step costs nothing more.

    A step that no rank applies is given up whole: residuals are what they were before it. So is a sum that
    overflows though every gradient is finite.
    """

    def __init__(self, on_nonfinite: str, telemetry: Telemetry) -> None:
        self.on_nonfinite, self._telemetry = on_nonfinite, telemetry

    def judge(
        self,
        errors: Sequence[BaseException],
        ranks: Iterable[int],
        *,
        scaled: bool = False,
        again: bool = False,
        failure: BaseException | None = None,
    ) -> Verdict:
        """What becomes of a step; counts it where it is skipped or carried out once more."""
        if not errors and failure is None:
            return Verdict(Outcome.APPLIED)
        error = worst(errors) if failure is None else failure
        if again and not scaled and (verdict := self.repeat(errors, ranks)) is not None:
            return verdict
        # known to all ranks alike; after an edit the gradient is not what was folded in
        drop = isinstance(error, NonFiniteGradientError)
        if scaled and drop:
            return Verdict(Outcome.OVERFLOW, error, drop)
        return Verdict(Outcome.SKIPPED if self._skips(errors) else Outcome.RAISE, error, drop)

    def repeat(self, errors: Sequence[BaseException], ranks: Iterable[int]) -> Verdict | None:
        """Where the step is carried out once more without the gradients of bad ranks: so; counts it."""
        if self.on_nonfinite != ZERO or not _about_numbers(errors):
            return None
        bad = sorted({rank for error in errors for rank in error.where})
        if not bad:
            return None
        self._telemetry.num_dropped += 1
        self._tell(self._telemetry.num_dropped, errors, f"those of ranks {bad} are left out of this step")
        return Verdict(Outcome.AGAIN, worst(errors), any(rank in bad for rank in ranks))

    def _skips(self, errors: Sequence[BaseException]) -> bool:
        if self.on_nonfinite == RAISE or not _about_numbers(errors):
            return False
        self._telemetry.num_skipped += 1
        self._tell(self._telemetry.num_skipped, errors, "all ranks skip this step")
        return True

    def _tell(self, count: int, errors: Sequence[NonFiniteGradientError], what: str) -> None:
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, ...: a training that has blown up fills no disk
            seen = worst(errors).finding
            _log.warning("%s; %s, as on_nonfinite=%r asks (%d so far)", seen, what, self.on_nonfinite, count)


def worst(failures: Iterable[Failure]) -> Failure:
    """Of a step's errors the one to look at: what stands on this rank alone, or else an edit."""
    kinds = (EditedGradientError, NonFiniteGradientError)
    return min(failures, key=lambda error: 1 + kinds.index(type(error)) if type(error) in kinds else 0)


def _about_numbers(errors: Sequence[BaseException]) -> TypeGuard[Sequence[NonFiniteGradientError]]:
    """Whether all ranks have these errors, and no rank another one."""
    return bool(errors) and all(isinstance(error, NonFiniteGradientError) for error in errors)
