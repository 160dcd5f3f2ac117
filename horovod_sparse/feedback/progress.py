"""What a bucket has to know of its training so far: steps, learning rates, and the residual's units."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: rates below this part of the largest one so far count as that part of it: no sequence of rates
#: multiplies a residual by more
LARGEST_GROWTH = 10.0


@dataclass(frozen=True)
class Progress:
    """Steps, learning rates, and the residual's units: all that outlives a bucket beside its residual.

    It goes on where a sparsifier's state has to start anew: in other buckets, at another number of ranks.

    Attributes:
        step: synchronizations done; schedules of the density count them.
        learning_rate: whose gradients the residual is made of, where it follows the rate; None before the
            first. Never 0: a rate of 0 has no quotient, and what comes after it goes on from the rate
            before.
        largest_rate: so far; None before the first.
        scale: what the residual has been multiplied by since the first step (1 where it follows nothing).
    """

    step: int = 0
    learning_rate: float | None = None
    largest_rate: float | None = None
    scale: float = 1.0

    def at(self, learning_rate: float | None) -> Progress:
        """With the learning rate of this step, where it is one: a finite number above 0.

        A rate that is less than a tenth of the largest so far (`LARGEST_GROWTH`) counts as that tenth. A
        residual that follows a schedule to nearly 0 therefore grows to ten times its size, not without
        limit, and shrinks again by as much when the rate comes back.

        Example:
            >>> falling = Progress().at(0.5).at(0.1)
            >>> falling.learning_rate, falling.at(0.0).learning_rate, falling.at(1e-6).learning_rate
            (0.1, 0.1, 0.05)
        """
        if learning_rate is None or not 0.0 < learning_rate < math.inf:
            return self
        largest = max(learning_rate, self.largest_rate or 0.0)
        counted = max(learning_rate, largest / LARGEST_GROWTH)
        if (counted, largest) == (self.learning_rate, self.largest_rate):
            return self
        return dataclasses.replace(self, learning_rate=counted, largest_rate=largest)

    def rescaled(self, factor: float) -> Progress:
        """Of a residual that has been multiplied by a factor."""
        return dataclasses.replace(self, scale=self.scale * factor)

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint; the step number is in the sparsifier's state."""
        plain = dataclasses.asdict(self)
        del plain["step"]
        return plain

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any], step: int) -> Progress:
        """As `to_plain` saved it; older checkpoints have the last learning rate alone.

        Example:
            >>> Progress.from_plain({"learning_rate": 0.0}, 7)
            Progress(step=7, learning_rate=None, largest_rate=None, scale=1.0)
        """
        rate = saved["learning_rate"] or None  # one of 0 was remembered once
        return cls(int(step), rate, saved.get("largest_rate") or rate, saved.get("scale", 1.0))


def progress_of(names: Iterable[str], known: Mapping[str, Progress]) -> Progress:
    """Of a new bucket, from that of its parameters in other buckets.

    Schedules go on at the largest step number; that of all others, where no parameter has one itself.

    Args:
        names: of the bucket's parameters.
        known: by parameter name.

    Example:
        >>> known = {"b": Progress(3, 0.1), "c": Progress(5)}
        >>> progress_of("ab", known).learning_rate, [progress_of(name, known).step for name in "ba"]
        (0.1, [3, 5])
    """
    found = [known[name] for name in names if name in known]
    step = max((one.step for one in found or known.values()), default=0)
    return dataclasses.replace(found[0] if found else Progress(), step=step)


def resumed(own: Progress, told: Mapping[str, Any] | None, step: int) -> Progress:
    """Where all ranks start a bucket's state anew at one step of the training.

    Args:
        own: of this rank's bucket.
        told: of a rank that is furthest, as `Progress.to_plain` gave it: for a worker that has just come.
        step: that all go on from.

    Example:
        >>> resumed(Progress(), Progress(7, 0.1).to_plain(), 7).learning_rate
        0.1
        >>> resumed(Progress(5, 0.2), Progress(7, 0.1).to_plain(), 7).learning_rate
        0.2
    """
    if own.step == 0 and told is not None:
        return Progress.from_plain(told, step)
    return dataclasses.replace(own, step=step)
