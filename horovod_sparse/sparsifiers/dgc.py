"""Deep Gradient Compression: top-k by a threshold from a sample; DRAGONN and SIDCo sample the same way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays import Accumulator
from horovod_sparse.checks import check_count, check_density
from horovod_sparse.sparsifiers import BucketInfo, SparsifierState
from horovod_sparse.sparsifiers.base import SelectAndGather, Selected, step_generator

#: a quantile of fewer sampled hits than this jumps about
_LEAST_HITS = 64


@dataclass(frozen=True, kw_only=True)
class SampledSelection(SelectAndGather):
    """Base of algorithms that sample the magnitudes: every stride-th element, from a random start on.

    Args:
        sample_fraction: share of elements in the sample; more where it would hold too few that are sent.
        seed: of the random starts, which depend on seed, bucket, rank and step alone.

    Source: Lin et al., ICLR 2018 (DGC), Section 3 and its public program.
    """

    sample_fraction: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density("sample_fraction", self.sample_fraction, "a fraction in (0, 1]")
        check_count("seed", self.seed, low=0)

    def generator(self, info: BucketInfo, step: int) -> np.random.Generator:
        return step_generator(self.seed, info, step, info.rank)

    def stride(self, num_elements: int, k: int) -> int:
        """Returns the distance between sampled elements, so that the sample holds enough of the k largest."""
        enough = max(self.sample_fraction * num_elements, _LEAST_HITS * num_elements / k)
        return max(1, num_elements // math.ceil(enough))

    def sample(self, accumulator: Accumulator, k: int, generator: np.random.Generator) -> np.ndarray:
        stride = self.stride(accumulator.num_elements, k)
        return accumulator.sample_magnitudes(stride, int(generator.integers(stride)))

    def sampled_threshold(self, accumulator: Accumulator, k: int, generator: np.random.Generator) -> float:
        """Returns the ``(k m / n)``-th largest of m sampled magnitudes, which about k elements pass."""
        sample = self.sample(accumulator, k, generator)
        order = min(sample.size, max(1, round(k * sample.size / accumulator.num_elements)))
        return float(np.partition(sample, sample.size - order)[sample.size - order])


_TOO_MANY, _TOO_FEW, _LOWER, _ATTEMPTS = 1.3, 0.8, 0.8, 10


@dataclass(frozen=True, kw_only=True)
class DGC(SampledSelection):
    """Each rank sends about its k largest magnitudes, found by a threshold from a sample.

    The threshold is the k-th largest of a strided sample, scaled. If more than 1.3 k elements pass, the
    k largest of those are taken; if fewer than 0.8 k pass, the threshold is lowered by 0.8, ten times at
    most. One round, as top-k; density is per rank.

    The momentum correction, clipping and warm-up that make up the rest of DGC are feedback and schedule,
    and work with every sparsifier: ``feedback=MomentumCorrection(momentum=0.9, clip_norm=1.0)``,
    ``schedule=Stairs(steps=steps_per_epoch)``. They are not on by default: momentum correction asks for
    an optimizer without momentum, and a warm-up for the length of an epoch.

    Args:
        sample_fraction: share of elements in the sample.
        seed: of the sample's start, which depends on seed, bucket, rank and step alone.

    Source: Lin et al., ICLR 2018. Departure: too many hits are cut by magnitude; the public program
    cuts them by position.
    """

    name: ClassVar[str] = "dgc"

    def select(self, accumulator: Accumulator, k: int, state: SparsifierState, info: BucketInfo) -> Selected:
        if k >= accumulator.num_elements:
            return Selected(accumulator.largest(k))
        threshold = self.sampled_threshold(accumulator, k, self.generator(info, state.step))
        indices = accumulator.at_least(threshold)
        for _ in range(_ATTEMPTS):
            if indices.size >= _TOO_FEW * k or threshold == 0.0:
                break
            threshold *= _LOWER
            indices = accumulator.at_least(threshold)
        if indices.size > _TOO_MANY * k:
            return Selected(accumulator.largest(k))
        return Selected(indices)
