"""A threshold steered by feedback on the count, as MiCRO and ExDyna print it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from horovod_sparse.arrays.protocol import Accumulator
from horovod_sparse.collectives import ADDED, LOCAL
from horovod_sparse.errors import ArgumentError

__all__ = ["ThresholdScaling", "ThresholdState"]


@dataclass
class ThresholdState:
    """What a threshold rule carries from step to step.

    Attributes:
        threshold: the last threshold used (magnitude, in units of the accumulator), 0 before the first.
        correction: c of the sketch rule; the searched order is c * k.
        share: part of the last union that lies in the window this rank searches next, in [0, 1];
            negative where nothing is known of it.
        ahead: elements by which unions were longer than wanted, in all, where few are wanted.
        paused: steps in which, for that reason, nobody was to send anything; their turns are not used up.
        scale: what the residual has been multiplied by since the first step; a first threshold is, too.
    """

    threshold: float = field(default=0.0, metadata=LOCAL)
    correction: float = 1.0
    share: float = field(default=-1.0, metadata=LOCAL)
    ahead: int = field(default=0, metadata=ADDED)
    paused: int = field(default=0, metadata=ADDED)
    scale: float = field(default=1.0, metadata={**ADDED, **LOCAL})


@dataclass(frozen=True)
class ThresholdScaling:
    """`paper`: the next threshold is this one times 1 + gamma, 1 + gamma / 4, or 1 - gamma.

    The factor is chosen by count / k: above beta, within (1 / beta, beta], below. From a bad start
    this takes hundreds of steps, and inside its band the threshold only ever grows; kept for
    comparison with the papers. The first threshold, which the papers leave open, is
    1 / (2 * sqrt(k)), as in their public programs.

    Args:
        beta: width of the band around count = k.
        gamma: step of the scaling.

    Source: ExDyna, Algorithm 5 (the same constants in MiCRO's public program).
    """

    text_name: ClassVar[str] = "paper"

    beta: float = 1.1
    gamma: float = 0.005

    def __post_init__(self) -> None:
        if not self.beta >= 1.0:
            raise ArgumentError("beta", self.beta, "a factor of 1 or more")
        if not 0.0 < self.gamma < 1.0:
            raise ArgumentError("gamma", self.gamma, "a number in (0, 1)")

    def wanted(self, num_hits: int, num_selected: int, state: ThresholdState) -> int:
        """All hits, as printed."""
        return num_hits

    def find(self, accumulator: Accumulator, num_selected: int, state: ThresholdState) -> float:
        """This step's threshold."""
        if state.threshold == 0.0:
            state.threshold = state.scale / (2.0 * math.sqrt(num_selected))
        return 0.0 if num_selected >= accumulator.num_elements else state.threshold

    def steer(self, count: int, num_selected: int, state: ThresholdState) -> None:
        """Scales the threshold by what the union count says.

        Example:
            >>> state = ThresholdState(threshold=1.0)
            >>> ThresholdScaling().steer(200, 100, state); round(state.threshold, 6)
            1.005
            >>> ThresholdScaling().steer(100, 100, state); round(state.threshold, 6)
            1.006256
        """
        exam = count / num_selected
        if exam > self.beta:
            state.threshold *= 1.0 + self.gamma
        elif exam > 1.0 / self.beta:
            state.threshold *= 1.0 + self.gamma / 4.0
        else:
            state.threshold *= 1.0 - self.gamma
