"""Schedules: densities that change over the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from horovod_sparse.checks import check_count, check_density, check_number
from horovod_sparse.errors import ArgumentError


class Schedule(Protocol):
    """Gives the density of every step."""

    def density_at(self, step: int, final: float) -> float:
        """Returns the density of a step (from 0); `final` is the density after the schedule has ended."""


@dataclass(frozen=True)
class _Lasting:
    """Base of schedules: their length, in steps or in epochs of `steps_per_epoch` steps."""

    #: where `steps_per_epoch` is given alone
    default_epochs: ClassVar[float | None] = None

    steps: int | None = None
    epochs: float | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_count("steps", self.steps)
            if self.epochs is not None or self.steps_per_epoch is not None:
                raise ArgumentError("steps", self.steps, "either steps, or epochs and steps_per_epoch")
        elif self._epochs is None or self.steps_per_epoch is None:
            raise ArgumentError("steps", None, "steps, or epochs and steps_per_epoch")
        else:
            check_count("steps_per_epoch", self.steps_per_epoch)
            check_number("epochs", self._epochs, "a number of epochs above 0")

    @property
    def _epochs(self) -> float | None:
        return self.default_epochs if self.epochs is None else self.epochs

    @property
    def length(self) -> int:
        return self.steps or max(1, round((self._epochs or 0) * (self.steps_per_epoch or 0)))


@dataclass(frozen=True)
class Exponential(_Lasting):
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

    start: float = 0.25

    def __post_init__(self) -> None:
        check_density("start", self.start)
        super().__post_init__()

    def density_at(self, step: int, final: float) -> float:
        return final if step >= self.length else self._density_at(step, final)

    def _density_at(self, step: int, final: float) -> float:
        return self.start * (final / self.start) ** (step / self.length)


@dataclass(frozen=True)
class Linear(Exponential):
    """``density = start + (final - start) * t / length``, then final. Arguments are those of `Exponential`.

    Example:
        >>> Linear(steps=2, start=0.5).density_at(1, final=0.1)
        0.3
    """

    text_name: ClassVar[str] = "linear"

    def _density_at(self, step: int, final: float) -> float:
        return self.start + (final - self.start) * step / self.length


@dataclass(frozen=True)
class Stairs(_Lasting):
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
    default_epochs: ClassVar[float | None] = 1

    densities: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)

    def __post_init__(self) -> None:
        densities: Any = self.densities
        if not isinstance(densities, (list, tuple)) or not densities:
            raise ArgumentError("densities", densities, "a list of densities, each in (0, 1]")
        object.__setattr__(self, "densities", tuple(densities))  # lists are what users write
        for density in self.densities:
            check_density("densities", density)
        super().__post_init__()

    def density_at(self, step: int, final: float) -> float:
        stair = step // self.length
        return self.densities[stair] if stair < len(self.densities) else final


#: Schedules by the names that `Compression.parse` knows them under.
SCHEDULES: dict[str, type] = {made.text_name: made for made in (Exponential, Linear, Stairs)}
