"""Deep Gradient Compression: top-k by a sampled threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from horovod_sparse.arrays import Accumulator
from horovod_sparse.checks import check_count
from horovod_sparse.errors import UnknownNameError
from horovod_sparse.sparsifiers.base import (
    BucketInfo,
    SelectAndGather,
    Selected,
    SparsifierState,
    step_generator,
)
from horovod_sparse.thresholds import SampledThreshold

_TOO_MANY, _TOO_FEW, _LOWER, _ATTEMPTS = 1.3, 0.8, 0.8, 10


@dataclass(frozen=True, kw_only=True)
class DGC(SelectAndGather):
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
        threshold: "sampled" (the paper), or "exact" (k-th largest by block maxima, which costs less
            than the sample here).
        seed: of the sample's start, which depends on seed, bucket, rank and step alone.

    Source: Lin et al., ICLR 2018. Departure: too many hits are cut by magnitude; the public program
    cuts them by position.
    """

    name: ClassVar[str] = "dgc"

    sample_fraction: float = 0.01
    threshold: str = "sampled"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        SampledThreshold(self.sample_fraction)
        if self.threshold not in ("sampled", "exact"):
            raise UnknownNameError("threshold of dgc", str(self.threshold), ("sampled", "exact"))
        check_count("seed", self.seed, "a whole number, 0 or more", low=0)

    def select(self, accumulator: Accumulator, k: int, state: SparsifierState, info: BucketInfo) -> Selected:
        if self.threshold == "exact" or k >= accumulator.num_elements:
            return Selected(accumulator.largest(k))
        generator = step_generator(self.seed, info, state.step, info.rank)
        threshold = SampledThreshold(self.sample_fraction).find(accumulator, k, generator)
        indices = accumulator.at_least(threshold)
        for _ in range(_ATTEMPTS):
            if indices.size >= _TOO_FEW * k or threshold == 0.0:
                break
            threshold *= _LOWER
            indices = accumulator.at_least(threshold)
        if indices.size > _TOO_MANY * k:
            return Selected(accumulator.largest(k))
        return Selected(indices)
