"""A threshold from a strided sample, as DGC finds it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from horovod_sparse.arrays.protocol import Accumulator
from horovod_sparse.checks import check_density

__all__ = ["SampledThreshold"]

#: a quantile of fewer sampled hits than this jumps about
_LEAST_SAMPLED_HITS = 64


@dataclass(frozen=True)
class SampledThreshold:
    """The k-th largest magnitude, estimated from every stride-th element behind a random start.

    ``threshold = (k m / n)-th largest of m sampled magnitudes``

    Args:
        fraction: of the elements that is sampled, in (0, 1]; more are taken where the quantile of so
            few would not be stable.

    Source: Lin et al., ICLR 2018 (DGC), Section 3 and its public program.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        check_density("sample_fraction", self.fraction, "a fraction in (0, 1]")

    def stride(self, num_elements: int, k: int) -> int:
        """Distance of sampled elements.

        Example:
            >>> SampledThreshold(0.01).stride(1_000_000, 10_000), SampledThreshold(0.01).stride(1000, 10)
            (100, 1)
        """
        enough = max(
            math.ceil(self.fraction * num_elements), math.ceil(_LEAST_SAMPLED_HITS * num_elements / k)
        )
        return max(1, num_elements // enough)

    def find(self, accumulator: Accumulator, k: int, generator: np.random.Generator) -> float:
        """The estimate for this step's accumulator.

        Args:
            accumulator: of the bucket.
            k: elements wanted.
            generator: draws the start.
        """
        stride = self.stride(accumulator.num_elements, k)
        sample = accumulator.sample_magnitudes(stride, int(generator.integers(stride)))
        order = min(sample.size, max(1, round(k * sample.size / accumulator.num_elements)))
        return float(np.partition(sample, sample.size - order)[sample.size - order])
