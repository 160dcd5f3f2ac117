"""`density="auto"`: limits within which a density is chosen by the times of the training."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from horovod_sparse.checks import check_density, check_number
from horovod_sparse.errors import ArgumentError

#: densities that are compared stand apart by this factor, and are rounded to three digits
_FACTOR = 1.1


@dataclass(frozen=True)
class AutoDensity:
    """How dense may it be for nothing? Limits, and what counts as nothing.

    As text ``auto``, or ``auto(least=0.001,most=0.05)``. A training begins at `least`. When its plan is made
    from measured times, the density is, too: the largest one at which the predicted iteration is at most
    `tolerance` longer than at `least`. All ranks take rank 0's.

    Args:
        least: smallest density, in (0, 1].
        most: largest density, in [least, 1].
        tolerance: part of the iteration at `least` that may be added. The last bucket's messages have
            nothing left to hide behind, so that with 0 it is hardly ever more than `least`.

    Raises:
        ArgumentError: if they are not allowed, or `most` is below `least`.

    Example:
        >>> AutoDensity(least=0.01, most=0.013).candidates
        (0.01, 0.011, 0.0121, 0.013)
    """

    text_name: ClassVar[str] = "auto"

    least: float = 0.001
    most: float = 0.1
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        check_density("least", self.least)
        check_density("most", self.most)
        if self.most < self.least:
            raise ArgumentError("most", self.most, f"a density that is not below least={self.least}")
        allowed = "a part of an iteration from 0 to 1"
        check_number("tolerance", self.tolerance, allowed, low=0.0, high=1.0, include_low=True)
        if self.least < sys.float_info.min:  # what is smaller has no digits to grow by
            raise ArgumentError("least", self.least, f"a density from {sys.float_info.min:g}")
        for name in ("least", "most", "tolerance"):  # numbers of NumPy's are not written as text like these
            object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def candidates(self) -> tuple[float, ...]:
        """The densities that are compared, ascending; both limits are among them."""
        found = [self.least]
        while (following := float(f"{found[-1] * _FACTOR:.3g}")) < self.most:
            # where three digits are too few to tell the next one from this
            found.append(following if following > found[-1] else found[-1] * _FACTOR)
        return (*found, self.most) if self.most > self.least else tuple(found)

    @property
    def middle(self) -> float:
        """Where selection is timed: there, and at four times that, so that both limits are not far."""
        return min(self.most, max(self.least, (self.least * self.most) ** 0.5 / 2.0))
