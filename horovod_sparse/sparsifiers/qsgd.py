"""QSGD: every element rounded at random to one of a few levels, by the largest of its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.quantization import MOST_LEVELS, Quantization
from horovod_sparse.sparsifiers.base import BucketInfo, step_generator
from horovod_sparse.sparsifiers.rounds.quantized import Quantizer


@dataclass(frozen=True, kw_only=True)
class QSGD(Quantizer):
    """Every rank sends all elements, rounded at random to multiples of (its group's largest) / s.

    ``sent = sign(acc) (max / s) l,  l = floor(s |acc| / max + u),  u uniform in [0, 1)``

    so the expectation of what is sent is acc. One round: an allgather of n times 1 + ceil(log2(s + 1)) bits,
    and a float per group. `feedback="none"` is the paper's own; with error feedback, the default here as for
    all others, rounding errors are sent later, and the rounding need not be unbiased to converge.

    Args:
        levels: s, 1 to 127. 7 are 4 bits per element, 1 are 2, 127 are 8.
        group: d, elements that share a unit, a multiple of 32; 0 for all of a bucket, from two levels on.
        seed: of the random numbers by which values are rounded. They depend on seed, bucket, step, rank
            and position alone, so a resumed run draws what an uninterrupted one would have.

    Source: Alistarh et al., NeurIPS 2017, Section 3.1, with the buckets and the maximum that its experiments
    take. Departures: no L2 norm, which loses more; codes of fixed length instead of Elias codes.

    Example:
        >>> QSGD(levels=1).quantization.code_bits
        2
    """

    name: ClassVar[str] = "qsgd"

    levels: int = 7
    group: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("levels", self.levels, f"a whole number from 1 to {MOST_LEVELS}")
        if self.levels == 1 and not self.group:
            # rounding to 0 or the largest leaves errors of up to that, which shrink by 1 / sqrt(n) a step
            allowed = "a multiple of 32 with levels=1: without groups errors grow with sqrt(n)"
            raise ArgumentError("group", self.group, allowed)
        check_count("seed", self.seed, low=0)
        super().__post_init__()

    def key(self, info: BucketInfo, step: int) -> int:
        generator = step_generator(self.seed, info, step, info.rank)
        return int(generator.integers(2**64, dtype=np.uint64))

    @property
    def quantization(self) -> Quantization:
        return Quantization(self.levels, self.group)
