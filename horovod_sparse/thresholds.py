"""Finds thresholds, and adapts them to the number of elements that reached the last one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from horovod_sparse.arrays import Accumulator
from horovod_sparse.collectives import LOCAL


@dataclass(frozen=True)
class ThresholdState:
    """The state of a threshold rule: the last threshold, and what the rule has learned from counts."""

    #: the last one used (magnitude, in units of the accumulator), 0 before the first
    threshold: float = field(default=0.0, metadata=LOCAL)
    #: c of the sketch rule; the searched order is c * k
    correction: float = 1.0
    #: share of the last union that lies in this rank's next window; negative if unknown
    share: float = field(default=-1.0, metadata=LOCAL)
    #: with a small k: elements that all steps so far sent above k, together
    ahead: int = 0
    #: steps in which, since `ahead` is large, no rank sends anything; their turns are not used up
    paused: int = 0


#: of Algorithm 5: width of the band around count = k, and step of the scaling
_BETA, _GAMMA = 1.1, 0.005


class ThresholdScaling:
    """The rule `paper`: multiplies the threshold by 1 + gamma, 1 + gamma / 4 or 1 - gamma in every step.

    The factor is chosen by count / k: above beta, within (1 / beta, beta], below. From a bad start
    this takes hundreds of steps, and inside its band the threshold only ever grows; kept for
    comparison with the papers. The first threshold, which the papers leave open, is
    1 / (2 * sqrt(k)), as in their public programs.

    Source: ExDyna, Algorithm 5 (the same constants in MiCRO's public program).
    """

    def num_to_send(self, num_hits: int, num_selected: int, state: ThresholdState) -> int:
        """Returns how many elements of its window this rank sends: all that reach the threshold."""
        return num_hits

    def find(self, accumulator: Accumulator, num_selected: int, state: ThresholdState) -> ThresholdState:
        """Returns the state with this step's threshold."""
        if state.threshold:
            return state
        return replace(state, threshold=1.0 / (2.0 * math.sqrt(num_selected)))

    def steer(self, count: int, num_selected: int, state: ThresholdState) -> ThresholdState:
        """Returns the state after a step in which all ranks together sent `count` elements."""
        exam, factor = count / num_selected, 1.0 - _GAMMA
        if exam > _BETA:
            factor = 1.0 + _GAMMA
        elif exam > 1.0 / _BETA:
            factor = 1.0 + _GAMMA / 4.0
        return replace(state, threshold=state.threshold * factor)


#: elements in a window from which its share of the last union says more than chance does
_CHANCE = 10
#: k below which `ahead` corrects k, since rounding each rank's share to whole elements then matters
_FEW = 32


#: strength of the correction c, its range [1 / limit, limit], and the weight of the last share
_EXPONENT, _LIMIT, _MEMORY = 0.5, 16.0, 0.85


class Sketch:
    """The rule `sketch`: the threshold is the c k-th largest magnitude of this rank's accumulator.

    The fused pass leaves the maximum of every block, which makes order statistics nearly free, so
    nothing has to be guessed: no start value, no tail model, no message. Ranks may use different
    thresholds: replicas agree because all apply the same union.

    First, the magnitude of order c * k in the whole accumulator says how many elements of the rank's
    window are large: h hits. In step one these are sent. But a rank's gradient may be ten times what it
    was a step ago (one misread image in a small batch), and since every window was cleared at another
    time, h then says more about the order of steps than about the window. So, second, from step two on

        count = (c * share * k) ** 0.85 * h ** 0.15

    elements are sent, the largest of the window, where share is the window's part in the last union,
    which all ranks know. Shares add up to 1, so the union count is k up to what is left of the
    fluctuation of h, while h still moves the shares to where the large elements are. Where so few
    elements are expected that the last share is chance, h alone decides.

    c starts at 1 and follows the union count, ``c <- c * (k / count) ** 0.5``: h alone is too
    large on average, because the window that a rank is about to search is the one it has cleared
    longest ago. Steering the order (not the threshold) is stable: the count answers it linearly.

    Where k is below 32 whole elements are coarse: with k = 1 the largest element of each of several ranks may
    lie in its window. There all ranks keep account of how many elements too many were sent so far, and want
    up to half as many fewer in the next step, which may be none; what was too few is made up for by k at
    most. So the union is k on average. The fewer elements, the more of the correction is that, not c.
    """

    @staticmethod
    def _corrected_k(num_selected: int, state: ThresholdState) -> int:
        """Returns k; a small k less up to half of the elements that earlier steps sent too many."""
        part = 0.5 * (1.0 - min(1.0, num_selected / _FEW))
        return max(0, num_selected - math.ceil(part * state.ahead))

    def _steered_count(self, num_selected: int, state: ThresholdState) -> int:
        """Returns c * k, the number of elements of the whole bucket that should reach the threshold."""
        return max(1, round(self._corrected_k(num_selected, state) * state.correction))

    def find(self, accumulator: Accumulator, num_selected: int, state: ThresholdState) -> ThresholdState:
        """Returns the state with this step's threshold; 0 selects all elements that are not 0."""
        n, threshold = accumulator.num_elements, 0.0
        if num_selected < n:
            threshold = accumulator.kth_magnitude(min(self._steered_count(num_selected, state), n))
        return replace(state, threshold=threshold)

    def num_to_send(self, num_hits: int, num_selected: int, state: ThresholdState) -> int:
        """Returns how many elements of its window this rank sends."""
        target = self._corrected_k(num_selected, state)
        if target == 0:
            return 0
        hits = min(num_hits, self._steered_count(num_selected, state))  # many magnitudes equal the threshold
        if state.share < 0.0 or state.threshold == 0.0:
            return hits
        expected = max(0.0, state.share * state.correction * target)
        weight = _MEMORY * expected / (expected + _CHANCE)
        # + 1 and - 1: a window that gave nothing may give something again
        return round(math.expm1(weight * math.log1p(expected) + (1.0 - weight) * math.log1p(hits)))

    def steer(self, count: int, num_selected: int, state: ThresholdState) -> ThresholdState:
        """Returns the state with the factor c of `_steered_count` adapted to the elements that ranks sent."""
        target, correction = self._corrected_k(num_selected, state), state.correction
        few = num_selected < _FEW
        ahead = max(state.ahead + count - num_selected, -2 * num_selected) if few else 0
        if count and target:
            exponent = _EXPONENT * min(1.0, num_selected / _FEW)  # two that steer at once would oversteer
            corrected = correction * (target / count) ** exponent
            correction = min(max(corrected, 1.0 / _LIMIT), _LIMIT)
        paused = state.paused + (target == 0)
        return replace(state, correction=correction, ahead=ahead, paused=paused)


ThresholdRule: TypeAlias = Sketch | ThresholdScaling
#: by name
RULES: Mapping[str, ThresholdRule] = {"sketch": Sketch(), "paper": ThresholdScaling()}
