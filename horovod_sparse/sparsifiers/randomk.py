"""Random-k: k positions drawn at random, by all ranks alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays import Accumulator, Indices
from horovod_sparse.checks import check_count
from horovod_sparse.collectives import Synchronization
from horovod_sparse.sparsifiers import BucketInfo, SparseSum, SparsifierState, Traffic
from horovod_sparse.sparsifiers.base import SelectAndGather, Selected, step_generator
from horovod_sparse.sparsifiers.rounds.shared import sum_at, sum_traffic


def draw_positions(generator: np.random.Generator, num_elements: int, k: int) -> Indices:
    """Draws k different positions; every set of k positions is equally likely."""
    if 2 * k > num_elements:  # the others are fewer
        kept = np.ones(num_elements, bool)
        kept[draw_positions(generator, num_elements, num_elements - k)] = False
        return np.flatnonzero(kept).astype(np.int32)
    drawn = np.empty(0, np.int32)
    while drawn.size < k:
        more = generator.integers(num_elements, size=k - drawn.size, dtype=np.int32)
        drawn = np.sort(np.concatenate([drawn, more]))
        new = np.ones(drawn.size, bool)
        np.not_equal(drawn[1:], drawn[:-1], out=new[1:])  # NumPy's unique makes a table, which takes longer
        drawn = drawn[new]
    return drawn


@dataclass(frozen=True, kw_only=True)
class RandomK(SelectAndGather):
    """Each rank sends its values at k random positions, the same ones on all ranks.

    All ranks draw the same positions, so no index is ever sent: one allreduce of k values (and of what the
    header of a message would carry, five numbers per rank), and the union is exactly k.

    Args:
        seed: of the generator, which is this sparsifier's own: drawing never touches the global seeds
            of NumPy or of a framework. Positions depend on seed, bucket and step alone, so a
            resumed run draws what an uninterrupted one would have.

    Source: Stich et al. 2018 (random-k with memory).

    Example:
        >>> RandomK(density=0.25, seed=1).positions(BucketInfo("w", 8), step=0).size
        2
    """

    name: ClassVar[str] = "randomk"
    names_senders: ClassVar[bool] = False

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("seed", self.seed, low=0)

    def positions(self, info: BucketInfo, step: int) -> Indices:
        """Returns the k random positions of a step, ascending and unique, the same on all ranks."""
        generator = step_generator(self.seed, info, step)
        return draw_positions(generator, info.num_elements, self.num_selected(info, step))

    def select(self, accumulator: Accumulator, k: int, state: SparsifierState, info: BucketInfo) -> Selected:
        return Selected(self.positions(info, state.step))

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[tuple[SparseSum, SparsifierState]]:
        indices = self.positions(info, state.step)
        counts = np.full(info.size, indices.size)
        return (yield from sum_at(accumulator, indices, counts, info, self.wire)), state

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        return sum_traffic(int(counts[info.rank]), info, self.wire)
