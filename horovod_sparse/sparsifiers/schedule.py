"""Schedules: densities that change over the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from horovod_sparse.checks import check_count, check_density
from horovod_sparse.errors import ArgumentError


class Schedule(Protocol):
    """Gives the density of every step; a user's own class may be one."""

    def density_at(self, step: int, final: float) -> float:
        """Returns the density of a step (from 0); `final` is the density after the schedule has ended."""


@dataclass(frozen=True)
class Exponential:
    """Lowers the density in step t: ``start * (final / start) ** (t / steps)``, after `steps` steps final.

    Args:
        steps: length of the warm-up in synchronizations (batches / backward_passes_per_step).
        start: density of the first step, in (0, 1].

    Example:
        >>> Exponential(steps=2, start=0.25).density_at(1, final=0.01)
        0.05
    """

    text_name: ClassVar[str] = "exponential"

    steps: int
    start: float = 0.25

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_density("start", self.start)

    def density_at(self, step: int, final: float) -> float:
        return final if step >= self.steps else self.start * (final / self.start) ** (step / self.steps)


@dataclass(frozen=True)
class Stairs:
    """Lowers the density in stairs: each of `densities` for `steps` steps, then final.

    The defaults are DGC's warm-up over four epochs: 0.25, 0.0625, 0.015625, 0.004.

    Args:
        steps: length of each stair, such as an epoch.
        densities: of the stairs, each in (0, 1].

    Source: Lin et al., ICLR 2018, Section 3.3.

    Example:
        >>> [Stairs(steps=10).density_at(step, final=0.001) for step in (0, 9, 10, 35, 40)]
        [0.25, 0.25, 0.0625, 0.004, 0.001]
    """

    text_name: ClassVar[str] = "stairs"

    steps: int
    densities: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        densities: Any = self.densities
        if not isinstance(densities, (list, tuple)) or not densities:
            raise ArgumentError("densities", densities, "a list of densities, each in (0, 1]")
        object.__setattr__(self, "densities", tuple(densities))  # lists are what users write
        for density in self.densities:
            check_density("densities", density)

    def density_at(self, step: int, final: float) -> float:
        stair = step // self.steps
        return self.densities[stair] if stair < len(self.densities) else final


#: Schedules by the names that `Compression.parse` knows them under.
SCHEDULES: dict[str, type] = {made.text_name: made for made in (Exponential, Stairs)}
