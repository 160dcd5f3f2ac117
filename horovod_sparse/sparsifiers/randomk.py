"""Random-k: k positions drawn at random, by all ranks alike or by each rank for itself."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays.protocol import Accumulator, FoldReport, Indices, Values
from horovod_sparse.collectives import AllGather, AllReduce, Request, Synchronization
from horovod_sparse.errors import ArgumentError
from horovod_sparse.sparsifiers.base import (
    BucketInfo,
    SparseSum,
    Sparsifier,
    SparsifierState,
    Traffic,
    check_count,
    exchange_selections,
)
from horovod_sparse.wire import message_words

__all__ = ["RandomK"]

#: behind the values of an allreduce: a column of these per rank, which only that rank fills
_WORDS_PER_RANK = 3
#: a position is sent as two numbers below this, which float32 holds exactly
_HALF = 1 << 16


def _own_column(report: FoldReport, info: BucketInfo) -> Values:
    """Health and norm of this rank, zeros for the others: [3 P]; summed up, those of all ranks."""
    columns = np.zeros((_WORDS_PER_RANK, info.size), info.value_dtype)
    norm = min(math.sqrt(report.carried_square_norm), float(np.finfo(np.float32).max))
    columns[:, info.rank] = *divmod(report.first_nonfinite + 1, _HALF), norm
    return columns.reshape(-1)


@dataclass(frozen=True, kw_only=True)
class RandomK(Sparsifier):
    """k uniformly random positions, their values summed over ranks.

    With `shared` positions (default) all ranks draw the same ones, so no index is ever sent: one
    allreduce of k values (and of what the header of a message would carry, three numbers per rank), and
    the union is exactly k. With own positions: one allgather of indices and values, as top-k.

    Args:
        density: k / n, in (0, 1].
        shared: whether all ranks draw the same positions.
        seed: of the generator, which is this sparsifier's own: drawing never touches the global seeds
            of NumPy or of a framework. Positions depend on seed, bucket name and step alone, so a
            resumed run draws what an uninterrupted one would have.
        quantum: see `Sparsifier`.

    Source: Stich et al. 2018 (random-k with memory).

    Example:
        >>> RandomK(density=0.25, seed=1).positions(BucketInfo("w", 8), step=0).size
        2
    """

    name: ClassVar[str] = "randomk"

    shared: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.shared, bool):
            raise ArgumentError("shared", self.shared, "True or False")
        check_count("seed", self.seed, "a whole number, 0 or more", low=0)

    def positions(self, info: BucketInfo, step: int) -> Indices:
        """The positions of a step, ascending and unique."""
        entropy = [self.seed, zlib.crc32(info.name.encode()), step, 0 if self.shared else 1 + info.rank]
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
        k = self.num_selected(info, SparsifierState(step))
        drawn = generator.choice(info.num_elements, k, replace=False, shuffle=False)
        return np.sort(drawn).astype(np.int32)

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[SparseSum]:
        """One allreduce, or one allgather; see `Sparsifier.synchronize`."""
        indices = self.positions(info, state.step)
        values = accumulator.take(indices)
        accumulator.clear(indices)
        state.step += 1
        if not self.shared:
            return SparseSum.of(
                (yield from exchange_selections(accumulator, indices, values, info, self.quantum))
            )
        summed = yield AllReduce(np.concatenate([values, _own_column(accumulator.report, info)]))
        k = indices.size
        health = summed[k:].reshape(_WORDS_PER_RANK, info.size).astype(np.float64)
        first_nonfinite = (health[0] * _HALF + health[1]).astype(np.int64) - 1
        return SparseSum(
            indices,
            summed[:k],
            counts=np.full(info.size, k),
            first_nonfinite={rank: int(first) for rank, first in enumerate(first_nonfinite) if first >= 0},
            norms=health[2],
        )

    def rounds(self, size: int) -> tuple[type[Request], ...]:
        """One allreduce (shared) or one allgather."""
        return (AllReduce,) if self.shared else (AllGather,)

    def traffic(self, info: BucketInfo, counts: np.ndarray) -> tuple[Traffic, ...]:
        """K values and three numbers per rank (shared), or k indices and k values."""
        k, itemsize = int(counts[info.rank]), info.value_dtype.itemsize
        if self.shared:
            return (Traffic(AllReduce, (k + _WORDS_PER_RANK * info.size) * itemsize),)
        return (Traffic(AllGather, 4 * message_words(k, itemsize // 4, self.quantum)),)
