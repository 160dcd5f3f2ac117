"""Densities that change over the steps: warm-up, and anything else that is written as a list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from horovod_sparse.errors import ArgumentError

__all__ = ["SCHEDULES", "Exponential", "Linear", "Schedule", "Stairs"]


class Schedule(Protocol):
    """The density of every step."""

    def density_at(self, step: int, final: float) -> float:
        """Density of a step (from 0); `final` is the sparsifier's own, for after the schedule's end."""


def _check(name: str, start: float, steps: int) -> None:
    if not 0.0 < start <= 1.0:
        raise ArgumentError(f"{name} start", start, "a density in (0, 1]")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"{name} steps", steps, "a whole number of steps, 1 or more")


@dataclass(frozen=True)
class Exponential:
    """``density = start * (final / start) ** (t / steps)``, then final.

    Args:
        steps: length of the warm-up; epochs times steps per epoch, to count in epochs.
        start: density of the first step, in (0, 1].

    Example:
        >>> Exponential(steps=2, start=0.25).density_at(1, final=0.01)
        0.05
    """

    steps: int
    start: float = 0.25

    def __post_init__(self) -> None:
        _check("exponential", self.start, self.steps)

    def density_at(self, step: int, final: float) -> float:
        """See `Schedule.density_at`."""
        return final if step >= self.steps else self.start * (final / self.start) ** (step / self.steps)


@dataclass(frozen=True)
class Linear:
    """``density = start + (final - start) * t / steps``, then final.

    Args:
        steps: length of the warm-up.
        start: density of the first step, in (0, 1].

    Example:
        >>> Linear(steps=2, start=0.5).density_at(1, final=0.1)
        0.3
    """

    steps: int
    start: float = 0.25

    def __post_init__(self) -> None:
        _check("linear", self.start, self.steps)

    def density_at(self, step: int, final: float) -> float:
        """See `Schedule.density_at`."""
        return final if step >= self.steps else self.start + (final - self.start) * step / self.steps


@dataclass(frozen=True)
class Stairs:
    """A list of densities, each for the same number of steps (an epoch, say), then final.

    The defaults are DGC's warm-up over four epochs: 0.25, 0.0625, 0.015625, 0.004.

    Args:
        steps: length of each stair; the steps of an epoch, to go by epoch.
        densities: of the stairs, each in (0, 1].

    Source: Lin et al., ICLR 2018, Section 3.3.

    Example:
        >>> [Stairs(steps=10).density_at(step, final=0.001) for step in (0, 9, 10, 35, 40)]
        [0.25, 0.25, 0.0625, 0.004, 0.001]
    """

    steps: int
    densities: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)

    def __post_init__(self) -> None:
        for density in self.densities:
            _check("stairs", density, self.steps)

    def density_at(self, step: int, final: float) -> float:
        """See `Schedule.density_at`."""
        stair = step // self.steps
        return self.densities[stair] if stair < len(self.densities) else final


#: Schedules by the names that `Compression.parse` knows them under.
SCHEDULES: dict[str, type] = {"exponential": Exponential, "linear": Linear, "stairs": Stairs}
