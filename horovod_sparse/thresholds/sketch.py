"""A threshold read off this very step's accumulator: an exact order statistic, gently corrected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from horovod_sparse.arrays.protocol import Accumulator
from horovod_sparse.errors import ArgumentError
from horovod_sparse.thresholds.scaling import ThresholdState

__all__ = ["Sketch"]


@dataclass(frozen=True)
class Sketch:
    """`sketch`: the threshold is the exact magnitude of order c * k in the rank's own accumulator.

    The fused pass leaves the maximum of every block, which makes order statistics nearly free, so
    nothing has to be guessed: no start value, no tail model, no message. Ranks may use different
    thresholds: replicas agree because all apply the same union. c starts at 1 and follows the union
    count, ``c <- c * (k / count) ** exponent``. Steering the order (not the threshold) is stable,
    because the count answers it almost linearly; it is needed at all because the window that a rank
    is about to search is the one it has cleared longest ago.

    Args:
        exponent: strength of the correction, in (0, 1].
        limit: c stays within [1 / limit, limit].
    """

    text_name: ClassVar[str] = "sketch"

    exponent: float = 0.7
    limit: float = 16.0

    def __post_init__(self) -> None:
        if not 0.0 < self.exponent <= 1.0:
            raise ArgumentError("exponent", self.exponent, "a number in (0, 1]")
        if not self.limit >= 1.0:
            raise ArgumentError("limit", self.limit, "a factor of 1 or more")

    def most(self, num_selected: int, state: ThresholdState) -> int:
        """As many elements reach the threshold, unless several are equal to it; no more are sent."""
        return max(1, round(num_selected * state.correction))

    def find(self, accumulator: Accumulator, num_selected: int, state: ThresholdState) -> float:
        """This step's threshold: 0 (everything that is not 0) when all elements are wanted."""
        order = self.most(num_selected, state)
        if num_selected >= accumulator.num_elements:
            state.threshold = 0.0
        else:
            state.threshold = accumulator.kth_magnitude(min(order, accumulator.num_elements))
        return state.threshold

    def steer(self, count: int, num_selected: int, state: ThresholdState) -> None:
        """Corrects c by what the union count says; an empty union says nothing about c.

        Example:
            >>> state = ThresholdState()
            >>> Sketch().steer(200, 100, state); round(state.correction, 4)
            0.6156
        """
        if count:
            corrected = state.correction * (num_selected / count) ** self.exponent
            state.correction = min(max(corrected, 1.0 / self.limit), self.limit)
