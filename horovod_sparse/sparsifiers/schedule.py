"""Densities that change: over the steps, by a schedule; or once, when the times of a training decide."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from horovod_sparse.checks import check_count, check_density, check_number
from horovod_sparse.errors import ArgumentError


class Schedule(Protocol):
    """The density of every step."""

    def density_at(self, step: int, final: float) -> float:
        """Density of a step (from 0); `final` is the sparsifier's own, for after the schedule's end."""


@dataclass(frozen=True)
class _Warmup:
    """A length in steps, or in epochs of so many steps; a density to start from."""

    steps: int | None = None
    epochs: float | None = None
    steps_per_epoch: int | None = None
    start: float = 0.25

    def __post_init__(self) -> None:
        check_density("start", self.start)
        if self.steps is not None:
            check_count("steps", self.steps)
            if self.epochs is not None or self.steps_per_epoch is not None:
                raise ArgumentError("steps", self.steps, "either steps, or epochs and steps_per_epoch")
            return
        if self.epochs is None or self.steps_per_epoch is None:
            raise ArgumentError("steps", None, "steps, or epochs and steps_per_epoch")
        check_count("steps_per_epoch", self.steps_per_epoch)
        check_number("epochs", self.epochs, "a number of epochs above 0", low=0.0, high=math.inf)

    @property
    def length(self) -> int:
        """In steps."""
        if self.steps is not None:
            return self.steps
        return max(1, round((self.epochs or 0) * (self.steps_per_epoch or 0)))

    def density_at(self, step: int, final: float) -> float:
        return final if step >= self.length else self._within(step, final)

    def _within(self, step: int, final: float) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Exponential(_Warmup):
    """``density = start * (final / start) ** (t / length)``, then final.

    Args:
        steps: length of the warm-up; or
        epochs: length, together with
        steps_per_epoch: synchronizations in an epoch (batches / backward_passes_per_step).
        start: density of the first step, in (0, 1].

    Example:
        >>> Exponential(steps=2, start=0.25).density_at(1, final=0.01)
        0.05
        >>> Exponential(epochs=1, steps_per_epoch=2, start=0.25).density_at(1, final=0.01)
        0.05
    """

    text_name: ClassVar[str] = "exponential"

    def _within(self, step: int, final: float) -> float:
        return self.start * (final / self.start) ** (step / self.length)


@dataclass(frozen=True)
class Linear(_Warmup):
    """``density = start + (final - start) * t / length``, then final. Arguments are those of `Exponential`.

    Example:
        >>> Linear(steps=2, start=0.5).density_at(1, final=0.1)
        0.3
    """

    text_name: ClassVar[str] = "linear"

    def _within(self, step: int, final: float) -> float:
        return self.start + (final - self.start) * step / self.length


@dataclass(frozen=True)
class Stairs:
    """A list of densities, each for the same number of steps, then final.

    The defaults are DGC's warm-up over four epochs: 0.25, 0.0625, 0.015625, 0.004.

    Args:
        steps: length of each stair; or
        epochs: length of each stair, 1 if left out, together with
        steps_per_epoch: synchronizations in an epoch.
        densities: of the stairs, each in (0, 1].

    Source: Lin et al., ICLR 2018, Section 3.3.

    Example:
        >>> [Stairs(steps=10).density_at(step, final=0.001) for step in (0, 9, 10, 35, 40)]
        [0.25, 0.25, 0.0625, 0.004, 0.001]
        >>> Stairs(steps_per_epoch=10).density_at(35, final=0.001)
        0.004
    """

    text_name: ClassVar[str] = "stairs"

    steps: int | None = None
    epochs: float | None = None
    steps_per_epoch: int | None = None
    densities: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)

    def __post_init__(self) -> None:
        densities: Any = self.densities
        if not isinstance(densities, (list, tuple)) or not densities:
            raise ArgumentError("densities", densities, "a list of densities, each in (0, 1]")
        object.__setattr__(self, "densities", tuple(densities))  # lists are what users write
        for density in self.densities:
            check_density("densities", density)
        self._length()

    def _length(self) -> _Warmup:
        epochs = self.epochs
        if epochs is None and self.steps_per_epoch is not None:
            epochs = 1
        return _Warmup(self.steps, epochs, self.steps_per_epoch)

    @property
    def length(self) -> int:
        """Of a stair, in steps."""
        return self._length().length

    def density_at(self, step: int, final: float) -> float:
        stair = step // self.length
        return self.densities[stair] if stair < len(self.densities) else final


#: Schedules by the names that `Compression.parse` knows them under.
SCHEDULES: dict[str, type] = {made.text_name: made for made in (Exponential, Linear, Stairs)}


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
