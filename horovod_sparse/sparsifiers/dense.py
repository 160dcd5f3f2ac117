"""No sparsifier: all elements, in an allreduce. For parameters that a rule keeps dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays import Accumulator, Indices
from horovod_sparse.collectives import AllReduce, Synchronization
from horovod_sparse.sparsifiers.base import BucketInfo, SparseSum, Sparsifier, SparsifierState, Traffic
from horovod_sparse.sparsifiers.rounds.shared import sum_at, sum_traffic
from horovod_sparse.wire import carried_norm

#: what ranks say of themselves in float16: two numbers below 2**33, each in digits that it holds exactly
_DIGITS = 2 ** (11 * np.arange(3, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Dense(Sparsifier):
    """Everything is sent, as Horovod would, by one allreduce of n values (and three numbers per rank).

    It stands where a sparsifier stands, so that dense parameters meet the same feedback (momentum
    correction, clipping), the same error for NaN and Inf, and the same checkpoint as the others.

    With ``values="float16"`` the allreduce is of halves. What a rank's own rounding takes, and what is too
    large for a sum of halves, stays in its residual; sums are rounded at each addition, as in any such one.

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
        if self.values == "float16":
            return (yield from _sum_halves(accumulator, indices, counts, info)), state
        return (yield from sum_at(accumulator, indices, counts, info, self.wire)), state

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """All values."""
        if self.values == "float16":
            return (Traffic(AllReduce, 2 * (info.num_elements + 2 * _DIGITS.size * info.size)),)
        return sum_traffic(info.num_elements, info, self.wire)


def _sum_halves(
    accumulator: Accumulator, indices: Indices, counts: np.ndarray, info: BucketInfo
) -> Synchronization[SparseSum]:
    values = accumulator.remove(indices)
    most = float(np.finfo(np.float16).max) / info.size
    sent = np.clip(values, -most, most).astype(np.float16)
    accumulator.add(indices, values - sent)
    report = accumulator.report
    own = report.first_nonfinite + 1, int(np.float32(carried_norm(report)).view(np.uint32))
    told = np.zeros((_DIGITS.size, 2, info.size), np.float16)
    told[:, :, info.rank] = np.array(own) // _DIGITS[:, None] % _DIGITS[1]
    summed = yield AllReduce(np.concatenate([sent, told.ravel()]))
    of_all = summed[values.size :].reshape(told.shape).astype(np.int64)
    marks, norms = np.tensordot(_DIGITS, of_all, 1)
    nonfinite = {rank: int(mark) - 1 for rank, mark in enumerate(marks) if mark > 0}
    norms = norms.astype(np.uint32).view(np.float32).astype(np.float64)
    return SparseSum(indices, summed[: values.size].astype(values.dtype), counts, nonfinite, norms)
