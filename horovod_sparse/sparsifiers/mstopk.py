"""MSTopk: top-k by bisection of a threshold, counting instead of sorting."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays.protocol import Accumulator, Indices
from horovod_sparse.collectives import AllGather, Request, Synchronization
from horovod_sparse.errors import ArgumentError
from horovod_sparse.sparsifiers.base import (
    BucketInfo,
    SparseSum,
    Sparsifier,
    SparsifierState,
    Traffic,
    send_selection,
)

__all__ = ["MSTopK"]

_SECTIONS = 15


@dataclass(frozen=True, kw_only=True)
class MSTopK(Sparsifier):
    """Each rank sends exactly k elements: all above a threshold found by bisection, then a fill.

    Bisection between the root mean square and the maximum magnitude counts how many elements pass, and
    keeps the tightest threshold that lets at most k through and the tightest that lets at least k
    through. Everything above the former is sent, and elements between the two fill up to exactly k.

    One round, as top-k. The fill takes the lowest indices, so among elements between the two thresholds
    it is not the largest that are sent; more passes narrow that gap.

    Args:
        density: k / n, in (0, 1].
        num_passes: most counting passes; each divides the interval of the threshold by 16.

    Source: Shi et al., MLSys 2021 (MSTopk). Departures: a pass counts for 15 thresholds at once, so it
    divides the interval by 16 instead of 2, and looks only inside blocks whose maximum passes; it starts
    from the root mean square (known from the fold), not the mean; the paper fills from a random place.

    Example:
        >>> MSTopK(density=0.01).num_passes
        5
    """

    name: ClassVar[str] = "mstopk"

    num_passes: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.num_passes, int) or self.num_passes < 1:
            raise ArgumentError("num_passes", self.num_passes, "a whole number, 1 or more")

    def select(self, accumulator: Accumulator, k: int) -> Indices:
        """Exactly k positions, ascending."""
        if k >= accumulator.num_elements:
            return accumulator.largest(k)
        # count(below) >= k, as far as there are so many that are not 0; count(above) <= k
        below, above = 0.0, float(np.nextafter(accumulator.dtype.type(accumulator.kth_magnitude(1)), np.inf))
        low = math.sqrt(accumulator.report.square_norm / accumulator.num_elements)
        if accumulator.count_at_least([low])[0] < k:
            low = 0.0
        for _ in range(self.num_passes):
            # _SECTIONS thresholds are counted in one read: as good as log2(_SECTIONS + 1) bisections
            grid = low + (above - low) * np.arange(1, _SECTIONS + 1) / (_SECTIONS + 1)
            counts = accumulator.count_at_least(grid)
            passing = int(np.searchsorted(-counts, -k, side="right"))  # the first of them have count >= k
            below = float(grid[passing - 1]) if passing else below
            above = float(grid[passing]) if passing < grid.size else above
            if passing and counts[passing - 1] == k:
                return accumulator.at_least(below)
            low = below
        chosen, reserve = accumulator.at_least(above), accumulator.at_least(below)
        if chosen.size > k or reserve.size < k:  # more than half the bucket is 0, or all are equal
            return accumulator.largest(k)
        rest = np.setdiff1d(reserve, chosen, assume_unique=True)
        return np.sort(np.concatenate([chosen, rest[: k - chosen.size]]))

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[SparseSum]:
        """One allgather; see `Sparsifier.synchronize`."""
        indices = self.select(accumulator, self.num_selected(info, state))
        state.step += 1
        return (yield from send_selection(accumulator, indices, info, self.wire))

    def rounds(self, size: int) -> tuple[type[Request], ...]:
        """One allgather."""
        return (AllGather,)

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """k indices and k values."""
        num_bytes = self.wire.message_bytes(int(counts[info.rank]), info.num_elements, info.value_dtype)
        return (Traffic(AllGather, num_bytes),)
