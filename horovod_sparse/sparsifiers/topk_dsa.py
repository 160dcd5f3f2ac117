"""TopkDSA: direct messages to the owners of regions, then an all-gather that may turn dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays import Accumulator, Values
from horovod_sparse.collectives import AllGather, Synchronization, rank_part
from horovod_sparse.sparsifiers import BucketInfo, SparseSum, Sparsifier, SparsifierState, Traffic
from horovod_sparse.sparsifiers.base import exchange_selections
from horovod_sparse.sparsifiers.rounds.shared import gather_parts
from horovod_sparse.sparsifiers.rounds.sparse_vectors import (
    SparseVector,
    Window,
    reduce_in_regions,
    region_traffic,
    round_for_wire,
)


@dataclass(frozen=True, kw_only=True)
class TopkDSA(Sparsifier):
    """Each rank sends its k largest magnitudes to the owners of P equal regions, who sum up and share them.

    ``sum = sum_i acc_i[selection_i]``, the same as top-k's, with duplicates added up on the way

    Three rounds: an all-to-all (P - 1 direct messages), an allgather of sizes, and an allgather of the
    sums: sparse, or without indices where that is shorter for all regions together. Density is per rank;
    the union grows up to P * k.

    Source: SparCML (Renggli et al., SC 2019), as "TopkDSA" in Ok-Topk and SparDL. The sizes decide for all
    ranks alike whether the sums travel dense.
    """

    name: ClassVar[str] = "topk_dsa"

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[tuple[SparseSum, SparsifierState]]:
        k = self.num_selected(info, state.step)
        regions = [rank_part(info.num_elements, rank, info.size) for rank in range(info.size)]
        indices = accumulator.largest(k)
        selection = SparseVector(indices, accumulator.remove(indices))
        report = accumulator.report
        total, arrived, error = yield from reduce_in_regions(selection, regions, report, info, self.wire)
        if error is not None:
            accumulator.add(indices, error)

        sizes = yield AllGather(np.array([len(total)], np.int32))
        if self._dense_is_shorter(sizes, regions, info):
            indices, values = yield from self._gather_dense(total, accumulator, regions, info)
        else:
            total = round_for_wire(total, accumulator, self.wire)
            sum_ = yield from exchange_selections(accumulator, total.indices, total.values, info, self.wire)
            indices, values = sum_.indices, sum_.values
        counts = np.full(info.size, k, np.int64)
        facts = {"union": float(sizes.sum()), "dense": float(self._dense_is_shorter(sizes, regions, info))}
        return SparseSum(indices, values, counts, arrived.notes, facts), state

    def _dense_is_shorter(self, sizes: NDArray[np.int32], regions: list[Window], info: BucketInfo) -> bool:
        """True if all ranks' sums are shorter with every value sent than as indices and values."""
        n, dtype = info.num_elements, info.value_dtype
        sparse = sum(self.wire.message_words(int(size), n, dtype) for size in sizes)
        return sum(self.wire.num_value_words(stop - start, dtype) for start, stop in regions) < sparse

    def _gather_dense(
        self, total: SparseVector, accumulator: Accumulator, regions: list[Window], info: BucketInfo
    ) -> Synchronization[tuple[NDArray[np.int32], Values]]:
        """Allgathers all values of every region, without indices; returns the sum's nonzero elements."""
        start, stop = regions[info.rank]
        values = np.zeros(stop - start, info.value_dtype)
        values[total.indices - start] = total.values
        dense, error = yield from gather_parts(values, regions, info, self.wire)
        accumulator.add(total.indices, error[total.indices - start])
        indices = np.flatnonzero(dense).astype(np.int32)
        return indices, dense[indices]

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        n, dtype = info.num_elements, info.value_dtype
        start, stop = rank_part(n, info.rank, info.size)
        longest = min(stop - start, int(counts.sum()))
        sparse = [self.wire.message_bytes(count, n, dtype) for count in (0, longest)]
        dense = 4 * self.wire.num_value_words(stop - start, dtype)
        return (
            region_traffic(int(counts[info.rank]), info, self.wire),
            Traffic(AllGather, 4),
            Traffic(AllGather, min(sparse[0], dense), max(sparse[1], dense)),
        )
