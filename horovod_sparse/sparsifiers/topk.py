"""Top-k: every rank sends its k largest magnitudes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from horovod_sparse.arrays import Accumulator
from horovod_sparse.sparsifiers.base import BucketInfo, SelectAndGather, Selected, SparsifierState


@dataclass(frozen=True, kw_only=True)
class TopK(SelectAndGather):
    """Each rank sends exactly its k largest magnitudes; all ranks apply the sum.

    ``selection_i = arg top-k |acc_i|,  sum = sum_i acc_i[selection_i]``

    One round: an allgather of k indices and k values. Density is per rank: selections of different
    ranks overlap only partly (build-up), so the union grows up to P * k.

    Source: Aji & Heafield 2017; Alistarh et al. 2018 (TopK-SGD); "TopkA" in SparDL. Selection is
    exact, by block maxima instead of sorting; ties go to the lowest index.
    """

    name: ClassVar[str] = "topk"

    def select(self, accumulator: Accumulator, k: int, state: SparsifierState, info: BucketInfo) -> Selected:
        return Selected(accumulator.largest(k))
