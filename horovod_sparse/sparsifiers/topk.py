"""Top-k: every rank sends its k largest magnitudes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays.protocol import Accumulator
from horovod_sparse.collectives import AllGather, Request, Synchronization
from horovod_sparse.sparsifiers.base import (
    BucketInfo,
    SparseSum,
    Sparsifier,
    SparsifierState,
    Traffic,
    send_selection,
)


@dataclass(frozen=True, kw_only=True)
class TopK(Sparsifier):
    """Each rank sends exactly its k largest magnitudes; all apply the sum.

    ``selection_i = arg top-k |acc_i|,  sum = sum_i acc_i[selection_i]``

    One round: an allgather of k indices and k values. Density is per rank: selections of different
    ranks overlap only partly (build-up), so the union grows up to P * k.

    Args:
        density: k / n, in (0, 1].
        quantum: see `Sparsifier`.

    Source: Aji & Heafield 2017; Alistarh et al. 2018 (TopK-SGD); "TopkA" in SparDL. Selection is
    exact, by block maxima instead of sorting; ties go to the lowest index.

    Example:
        >>> TopK(density=0.25).density
        0.25
    """

    name: ClassVar[str] = "topk"

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[SparseSum]:
        """One allgather; see `Sparsifier.synchronize`."""
        indices = accumulator.largest(self.num_selected(info, state))
        state.step += 1
        return (yield from send_selection(accumulator, indices, info, self.wire))

    def rounds(self, size: int) -> tuple[type[Request], ...]:
        """One allgather."""
        return (AllGather,)

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """Indices and values of k elements."""
        num_bytes = self.wire.message_bytes(int(counts[info.rank]), info.num_elements, info.value_dtype)
        return (Traffic(AllGather, num_bytes),)
