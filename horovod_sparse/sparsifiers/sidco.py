"""SIDCo: a threshold from fitting an exponential to the magnitudes, in stages up the tail."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays import Accumulator
from horovod_sparse.collectives import LOCAL
from horovod_sparse.sparsifiers.base import BucketInfo, Selected, SparsifierState
from horovod_sparse.sparsifiers.dgc import SampledSelection

#: share that a stage before the last leaves; tolerance of achieved / target around 1; steps between changes
#: of the number of stages, and the most stages
_FIRST_DENSITY, _TOLERANCE, _ADAPT_EVERY, _MAX_STAGES = 0.25, 0.2, 5, 6
#: stands for achieved / target if nothing was sent, since 0 has no logarithm
_NOTHING = 1e-6


@dataclass(frozen=True)
class SIDCoState(SparsifierState):
    """State of SIDCo: the number of stages of its fit, and the direction of its last change."""

    #: how often the tail is fitted now
    num_stages: int = field(default=1, metadata=LOCAL)
    #: achieved / target of the steps since the stage count was last looked at
    recent: tuple[float, ...] = field(default=(), metadata=LOCAL)
    #: +1 or -1, where the number of stages went last
    direction: int = field(default=1, metadata=LOCAL)
    #: |ln(achieved / target)| when it was last looked at; negative before
    error: float = field(default=-1.0, metadata=LOCAL)


@dataclass(frozen=True, kw_only=True)
class SIDCo(SampledSelection):
    """Each rank sends |acc| >= threshold, the threshold being a quantile of a fitted exponential.

    Stage 1 fits all magnitudes and finds where a quarter lies above; each further stage fits what exceeds the
    last threshold, and the last one goes for what is left of the density: ``d = 0.25 ** (M - 1) * d_M``. The
    number of stages M, at most 6, follows the outcome: every 5 steps, if the mean of sent / k is outside
    1 +- 0.2, it moves by one; on in the direction it moved last (up at first) if that made the error
    smaller, else back.

    One round: an allgather of as many indices and values as pass. Density is per rank.

    Args:
        sample_fraction: share of elements that is fitted; 1 fits all of them, which are copied for it.
        seed: of the sample's start, which depends on seed, bucket, rank and step alone.

    Source: Abdelmoniem et al., MLSys 2021 (SIDCo-E). Departures: fits are made to a strided sample, as
    DGC's; zeros are left out; the first M follows from the density; where a fit puts the threshold above
    every magnitude, as it would for ever where they are nearly equal, the k largest are sent; and the
    direction in which M moves, since which way helps depends on the tail: a single exponential fit passes
    too many of a heavy one and too few of a Gaussian, and further stages mend both.
    """

    name: ClassVar[str] = "sidco"

    def init(self, info: BucketInfo) -> SIDCoState:
        stages = math.floor(math.log(self.density) / math.log(_FIRST_DENSITY))
        return SIDCoState(num_stages=min(max(stages, 1), _MAX_STAGES))

    def threshold(self, sample: np.ndarray, k: int, num_stages: int) -> float:
        """Returns a threshold that about k magnitudes pass, by `num_stages` fits to a sample of them."""
        sizes, threshold = sample[sample > 0.0], 0.0
        # zeros are not fitted, so the share is one of the others
        density = k / max(sizes.size, 1)
        for stage in range(num_stages):
            last = stage == num_stages - 1 or density >= _FIRST_DENSITY
            wanted = density if last else _FIRST_DENSITY
            # an exponential's only parameter is the mean excess over the last threshold
            mean = float(sizes.mean()) - threshold if sizes.size > 1 else 0.0
            if mean <= 0.0 or wanted >= 1.0:
                break
            threshold += mean * math.log(1.0 / wanted)
            if last:
                break
            density /= _FIRST_DENSITY
            sizes = sizes[sizes >= threshold]
        return threshold

    def find_threshold(self, accumulator: Accumulator, k: int, state: SIDCoState, info: BucketInfo) -> float:
        if k >= info.num_elements:
            return 0.0
        sample = self.sample(accumulator, k, self.generator(info, state.step)).astype(np.float64)
        share = max(1, round(k * sample.size / info.num_elements))
        return self.threshold(sample, share, state.num_stages)

    def select(self, accumulator: Accumulator, k: int, state: SIDCoState, info: BucketInfo) -> Selected:
        threshold = self.find_threshold(accumulator, k, state, info)
        indices = accumulator.at_least(threshold)
        state = self._adapt_num_stages(state, indices.size / k)
        if not indices.size:  # the fit ends above every magnitude, as it does for equal ones
            indices = accumulator.largest(k)
            indices = indices[accumulator.take(indices) != 0]
        return Selected(indices, {"threshold": threshold, "stages": float(state.num_stages)}, state)

    def _adapt_num_stages(self, state: SIDCoState, achieved: float) -> SIDCoState:
        recent = (*state.recent, achieved)
        if len(recent) < _ADAPT_EVERY:
            return replace(state, recent=recent)
        mean = float(np.mean(recent))
        if abs(mean - 1.0) <= _TOLERANCE:
            return replace(state, recent=())
        error = abs(math.log(max(mean, _NOTHING)))
        direction = -state.direction if error > state.error >= 0.0 else state.direction
        if not 1 <= state.num_stages + direction <= _MAX_STAGES:
            direction = -direction
        num_stages = min(max(state.num_stages + direction, 1), _MAX_STAGES)
        return replace(state, num_stages=num_stages, recent=(), direction=direction, error=error)
