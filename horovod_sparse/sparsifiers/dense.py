"""No sparsifier: all elements, in an allreduce. For parameters that a rule keeps dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays import Accumulator
from horovod_sparse.collectives import Synchronization
from horovod_sparse.sparsifiers.base import BucketInfo, SparseSum, Sparsifier, SparsifierState, Traffic
from horovod_sparse.sparsifiers.rounds.shared import sum_at, sum_traffic


@dataclass(frozen=True, kw_only=True)
class Dense(Sparsifier):
    """Everything is sent, as Horovod would, by one allreduce of n values (and five numbers per rank).

    It stands where a sparsifier stands, so that dense parameters meet the same feedback (momentum
    correction, clipping), the same error for NaN and Inf, and the same checkpoint as the others.

    Example:
        >>> Dense().density
        1.0
    """

    name: ClassVar[str] = "dense"

    density: float = 1.0

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[tuple[SparseSum, SparsifierState]]:
        n = info.num_elements
        counts = np.full(info.size, n)
        indices = np.arange(n, dtype=np.int32)
        return (yield from sum_at(accumulator, indices, counts, info, self.wire)), state

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """All values."""
        return sum_traffic(info.num_elements, info, self.wire)
