"""Chunk top-k: every rank sends the largest magnitudes of every chunk of neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays import Accumulator
from horovod_sparse.checks import check_count
from horovod_sparse.sparsifiers.base import BucketInfo, SelectAndGather, Selected, SparsifierState
from horovod_sparse.sparsifiers.rounds.sparse_vectors import GOLDEN


@dataclass(frozen=True, kw_only=True)
class ChunkTopK(SelectAndGather):
    """Each rank sends the largest magnitudes of every chunk of the bucket, the same share of each.

    ``selection_i = union over chunks C of arg top-k_C |acc_i|,  k_C = density |C|,  sum of k_C = k``

    One round, as top-k, and exactly k elements. Chunks are searched one by one in cache, no threshold is
    looked for, and no layer is left out for another one's larger gradients. Where ``density |C|`` is not
    whole, chunks take turns with the rest. Density is per rank.

    Args:
        chunk: elements of a chunk; the last one of a bucket may be shorter.

    Source: the chunks of DeMo (Peng et al. 2024) and SparseLoCo (Sarfi et al. 2025). Departures: flat chunks
    of a bucket, not blocks of a matrix; quotas that add up to k for any density.

    Example:
        >>> ChunkTopK(density=0.25, chunk=6).quotas(16, 4, step=0).tolist()
        [1, 2, 1]
    """

    name: ClassVar[str] = "chunk_topk"

    chunk: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("chunk", self.chunk, "a number of elements, 1 or more")

    def quotas(self, num_elements: int, k: int, step: int) -> NDArray[np.int64]:
        """Returns how many elements a step sends of each chunk: k in sum, at most the length of each.

        ``floor((stop k + s) / n) - floor((start k + s) / n)``, where the shift s / n goes through the
        multiples of the golden ratio, so that every chunk has its turns at nearly equal distances.
        """
        edges = np.arange(0, num_elements + self.chunk, self.chunk, dtype=np.int64)
        edges[-1] = num_elements
        shift = step * GOLDEN % 2**32 * num_elements >> 32
        return np.diff((edges * k + shift) // num_elements)

    def select(self, accumulator: Accumulator, k: int, state: SparsifierState, info: BucketInfo) -> Selected:
        quotas = self.quotas(info.num_elements, k, state.step)
        return Selected(accumulator.largest_of_each(self.chunk, quotas))
