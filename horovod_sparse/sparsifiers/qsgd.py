"""QSGD: every element rounded at random to one of a few levels, by the norm of its group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_sparse.checks import check_count
from horovod_sparse.errors import UnknownNameError
from horovod_sparse.kernels.quantization import MOST_LEVELS, Quantization
from horovod_sparse.sparsifiers.base import BucketInfo, step_generator
from horovod_sparse.sparsifiers.rounds.quantized import Quantizer


@dataclass(frozen=True, kw_only=True)
class QSGD(Quantizer):
    """Every rank sends all elements, each rounded at random to a multiple of its group's norm divided by s.

    ``sent = sign(acc) (norm / s) l,  l = floor(s |acc| / norm + u),  u uniform in [0, 1)``

    so the expectation of what is sent is acc. One round: an allgather of n times 1 + ceil(log2(s + 1)) bits,
    and a float per group. `feedback="none"` is the paper's own; with error feedback, the default here as for
    all others, rounding errors are sent later, and the rounding need not be unbiased to converge.

    Args:
        levels: s, 1 to 127. 7 are 4 bits per element, 1 are 2, 127 are 8.
        group: d, elements that share a norm, a multiple of 32; 0 for all of a bucket.
        norm: "max" (of the magnitudes) or "l2", the paper's analysis. The second loses more: up to
            ``sqrt(d) / s`` times the gradient's square. Where that is 1 or more, error feedback would add up
            errors without limit, so it takes ``feedback="none"``, more levels or smaller groups; so does one
            level of the maximum of a whole bucket.
        seed: of the random numbers by which values are rounded. They depend on seed, bucket, step, rank
            and position alone, so a resumed run draws what an uninterrupted one would have.

    Source: Alistarh et al., NeurIPS 2017, Section 3.1, with the buckets and the maximum that its experiments
    take. Departures: codes of fixed length instead of Elias codes; norms have 24 bits, also for float64.

    Example:
        >>> QSGD(levels=1).quantization.planes
        2
    """

    name: ClassVar[str] = "qsgd"

    levels: int = 7
    group: int = 512
    norm: str = "max"
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("levels", self.levels, f"a whole number from 1 to {MOST_LEVELS}")
        if self.norm not in ("max", "l2"):
            raise UnknownNameError("norm of qsgd", str(self.norm), ("max", "l2"))
        check_count("seed", self.seed, low=0)
        super().__post_init__()

    def key(self, info: BucketInfo, step: int) -> int:
        generator = step_generator(self.seed, info, step, info.rank)
        return int(generator.integers(2**64, dtype=np.uint64))

    @property
    def quantization(self) -> Quantization:
        return Quantization(self.levels, self.group, self.norm)

    @property
    def why_diverges(self) -> str:
        if self.norm == "max":
            # rounding to 0 or the largest leaves errors of up to that, which shrink by 1 / sqrt(n) a step
            words = "one level of the largest of all elements keeps errors of sqrt(n) gradients"
            return words if self.levels == 1 and not self.group else ""
        elements = self.group or math.inf
        if min(elements / self.levels**2, math.sqrt(elements) / self.levels) < 1.0:
            return ""
        return (
            f"{self.levels} levels of the L2 norm lose more of {self.group or 'all'} elements than they send"
        )
