"""A threshold read off this very step's accumulator: an exact order statistic, gently corrected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from horovod_sparse.arrays.protocol import Accumulator
from horovod_sparse.errors import ArgumentError
from horovod_sparse.thresholds.scaling import ThresholdState

__all__ = ["Sketch"]


#: elements in a window at which its share of the last union tells as much as chance hides
_CHANCE = 10
#: below so many elements the union is counted: rounding every rank's part of it to whole ones is felt
_FEW = 32


@dataclass(frozen=True)
class Sketch:
    """`sketch`: the threshold is an exact order statistic of the rank's own accumulator, in two steps.

    The fused pass leaves the maximum of every block, which makes order statistics nearly free, so
    nothing has to be guessed: no start value, no tail model, no message. Ranks may use different
    thresholds: replicas agree because all apply the same union.

    First, the magnitude of order c * k in the whole accumulator says how many elements of the rank's
    window are large: h hits. In step one these are sent. But a rank's gradient may be ten times what it
    was a step ago (one misread image in a small batch), and since every window was cleared at another
    time, h then says more about the order of steps than about the window. So, second, from step two on

        count = (c * share * k) ** memory * h ** (1 - memory)

    elements are sent, the largest of the window, where share is the window's part in the last union,
    which all ranks know. Shares add up to 1, so the union count is k up to what is left of the
    fluctuation of h, while h still moves the shares to where the large elements are. Where so few
    elements are expected that the last share is chance, h alone decides.

    c starts at 1 and follows the union count, ``c <- c * (k / count) ** exponent``: h alone is too
    large on average, because the window that a rank is about to search is the one it has cleared
    longest ago. Steering the order (not the threshold) is stable: the count answers it linearly.

    Where k is below 32 whole elements are coarse: with k = 1 the largest element of each of several ranks may
    lie in its window. There all ranks keep account of how many elements too many were sent so far, and want
    up to half as many fewer in the next step, which may be none; what was too few is made up for by k at
    most. So the union is k on average. The fewer elements, the more of the correction is that, not c.

    Args:
        exponent: strength of the correction, in (0, 1].
        limit: c stays within [1 / limit, limit].
        memory: weight of the last share, in [0, 1); 0 sends all hits.
    """

    text_name: ClassVar[str] = "sketch"

    exponent: float = 0.5
    limit: float = 16.0
    memory: float = 0.85

    def __post_init__(self) -> None:
        if not 0.0 < self.exponent <= 1.0:
            raise ArgumentError("exponent", self.exponent, "a number in (0, 1]")
        if not self.limit >= 1.0:
            raise ArgumentError("limit", self.limit, "a factor of 1 or more")
        if not 0.0 <= self.memory < 1.0:
            raise ArgumentError("memory", self.memory, "a weight in [0, 1)")

    @staticmethod
    def _target(num_selected: int, state: ThresholdState) -> int:
        """k, less a part of what was sent too much where few are wanted: all of it would be too much."""
        part = 0.5 * (1.0 - min(1.0, num_selected / _FEW))
        return max(0, num_selected - math.ceil(part * state.ahead))

    def _order(self, num_selected: int, state: ThresholdState) -> int:
        """c * k: as many elements reach the threshold, unless several are equal to it."""
        return max(1, round(self._target(num_selected, state) * state.correction))

    def find(self, accumulator: Accumulator, num_selected: int, state: ThresholdState) -> float:
        """This step's threshold: 0 (everything that is not 0) when all elements are wanted."""
        order = self._order(num_selected, state)
        if num_selected >= accumulator.num_elements:
            state.threshold = 0.0
        else:
            state.threshold = accumulator.kth_magnitude(min(order, accumulator.num_elements))
        return state.threshold

    def wanted(self, num_hits: int, num_selected: int, state: ThresholdState) -> int:
        """How many elements of its window a rank sends.

        Example:
            >>> state = ThresholdState(threshold=0.5, share=0.25)
            >>> Sketch().wanted(num_hits=4000, num_selected=10_000, state=state)
            2687
        """
        target = self._target(num_selected, state)
        if target == 0:
            return 0
        hits = min(num_hits, self._order(num_selected, state))  # many magnitudes equal the threshold
        if state.share < 0.0 or state.threshold == 0.0:
            return hits
        expected = state.share * state.correction * target
        weight = self.memory * expected / (expected + _CHANCE)
        # + 1 and - 1: a window that gave nothing may give something again
        return round(math.expm1(weight * math.log1p(expected) + (1.0 - weight) * math.log1p(hits)))

    def steer(self, count: int, num_selected: int, state: ThresholdState) -> None:
        """Corrects c by what the union count says; an empty union says nothing about c.

        Example:
            >>> state = ThresholdState()
            >>> Sketch().steer(200, 100, state); round(state.correction, 4)
            0.7071
        """
        target = self._target(num_selected, state)
        few = num_selected < _FEW
        state.ahead = max(state.ahead + count - num_selected, -2 * num_selected) if few else 0
        state.paused += target == 0
        if count and target:
            exponent = self.exponent * min(1.0, num_selected / _FEW)  # two that steer at once would oversteer
            corrected = state.correction * (target / count) ** exponent
            state.correction = min(max(corrected, 1.0 / self.limit), self.limit)
