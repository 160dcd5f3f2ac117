"""Gradients that are not finite on some rank: an error, a step that no rank takes, or that rank left out.

Whatever is done is done by all ranks alike: each has seen the marks of all others, in messages that it gets
anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeGuard

from horovod_sparse.errors import ArgumentError, NonFiniteGradientError, NonFiniteSumError
from horovod_sparse.frontend.collective_errors import has_bad_gradient, worst
from horovod_sparse.telemetry import Telemetry

_log = logging.getLogger("horovod_sparse")

#: what `on_nonfinite` may be
RAISE, SKIP, ZERO = "raise", "skip", "zero"


def check_on_nonfinite(value: object) -> None:
    """Refuses what is no policy.

    Raises:
        ArgumentError: naming those there are.

    Example:
        >>> check_on_nonfinite("no")
        Traceback (most recent call last):
        horovod_sparse.errors.ArgumentError: on_nonfinite='no' is not allowed: give 'raise', 'skip' or 'zero'
    """
    if value not in (RAISE, SKIP, ZERO):
        raise ArgumentError("on_nonfinite", value, "'raise', 'skip' or 'zero'")


class Poison:
    """What one training does about it.

    * "raise": `NonFiniteGradientError` on every rank. Nothing is applied.
    * "skip": nothing is applied, and nothing raised: no rank's optimizer steps.
    * "zero": the ranks that have such a gradient drop all of it, in every bucket, and the step is carried out
      once more: the others' gradients wait in their residuals, so nothing is folded in again. A good step
      costs nothing more.

    With all three the gradient of a bad rank is dropped whole, and the good ranks' stay in their residuals.
    A sum that overflows though every gradient is finite has no bad rank. What overflows once overflows again
    as long as it waits, so with "skip" and "zero" all ranks drop their gradients then, and skip the step.

    Args:
        policy: one of these.
        telemetry: of the training; counts.

    Example:
        >>> poison = Poison("skip", Telemetry())
        >>> error = NonFiniteGradientError("fc", {1: "fc.weight"})
        >>> poison.skips([error]), poison.repeats([error]), poison.drops([error], rank=0)
        (True, False, False)
    """

    def __init__(self, policy: str, telemetry: Telemetry) -> None:
        check_on_nonfinite(policy)
        self.policy, self._telemetry = policy, telemetry

    def repeats(self, errors: Sequence[BaseException]) -> bool:
        """Whether the step is carried out once more, without the gradients of bad ranks; counts it."""
        if self.policy != ZERO or not _about_numbers(errors):
            return False
        bad = sorted({rank for error in errors for rank in error.where})
        if bad:
            self._telemetry.num_dropped += 1
            self._tell(self._telemetry.num_dropped, errors, f"those of ranks {bad} are left out of this step")
        return bool(bad)

    def skips(self, errors: Sequence[BaseException]) -> bool:
        """Whether the step is given up without an error; counts it."""
        if self.policy == RAISE or not _about_numbers(errors):
            return False
        self._telemetry.num_skipped += 1
        self._tell(self._telemetry.num_skipped, errors, "all ranks skip this step")
        return True

    def drops(self, errors: Sequence[BaseException], rank: int) -> bool:
        """Whether this rank's gradients leave its residuals."""
        if has_bad_gradient(errors, rank):
            return True
        return self.policy != RAISE and all(isinstance(error, NonFiniteSumError) for error in errors)

    def _tell(self, count: int, errors: Sequence[NonFiniteGradientError], what: str) -> None:
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, ...: a training that has blown up fills no disk
            seen = worst(errors).finding
            _log.warning("%s; %s, as on_nonfinite=%r asks (%d so far)", seen, what, self.policy, count)


def _about_numbers(errors: Sequence[BaseException]) -> TypeGuard[Sequence[NonFiniteGradientError]]:
    """Whether all ranks have these errors, and no rank another one."""
    return bool(errors) and all(isinstance(error, NonFiniteGradientError) for error in errors)
