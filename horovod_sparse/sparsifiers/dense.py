"""No sparsifier: all elements, in an allreduce. For parameters that a rule keeps dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays import Accumulator, WholeGradient
from horovod_sparse.arrays.whole import HEALTH_NUMBERS
from horovod_sparse.collectives import AllReduce, Synchronization
from horovod_sparse.sparsifiers import BucketInfo, SparseSum, Sparsifier, SparsifierState, Traffic
from horovod_sparse.sparsifiers.base import WholeSum
from horovod_sparse.sparsifiers.rounds.shared import sum_at, sum_traffic
from horovod_sparse.wire import Notes


@dataclass(frozen=True, kw_only=True)
class Dense(Sparsifier):
    """Every rank sends all elements, as Horovod would: an allreduce of n values (and five numbers per rank).

    It stands where a sparsifier stands, so that dense parameters meet the same feedback (momentum
    correction, clipping), the same error for NaN and Inf, and the same checkpoint as the others. From a
    `WholeGradient` it sends the elements as they are.
    """

    name: ClassVar[str] = "dense"

    density: float = 1.0

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[tuple[SparseSum, SparsifierState]]:
        n = info.num_elements
        if isinstance(accumulator, WholeGradient):
            total = yield AllReduce(accumulator.allreduce_buffer(info.rank, info.size))
            values, unhealthy, largest = accumulator.decode_sum(total, info.size)
            nothing = np.zeros(info.size)  # is held back
            notes = Notes(unhealthy, nothing, nothing.astype(np.int64), nothing)
            return WholeSum(values, np.full(info.size, n), notes, largest), state
        counts = np.full(info.size, n)
        indices = np.arange(n, dtype=np.int32)
        return (yield from sum_at(accumulator, indices, counts, info, self.wire)), state

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        (most,) = sum_traffic(info.num_elements, info, self.wire)
        least = (info.num_elements + HEALTH_NUMBERS * info.size) * info.value_dtype.itemsize
        return (Traffic(AllReduce, least, most.bytes_sent),)
