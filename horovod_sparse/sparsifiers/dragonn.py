"""DRAGONN: what passes a threshold is hashed into a fixed number of slots."""

from __future__ import annotations

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
from horovod_sparse.sparsifiers.randomness import step_generator
from horovod_sparse.thresholds.sampled import SampledThreshold
from horovod_sparse.wire import WireFormat

__all__ = ["DRAGONN", "hash_slots", "write_slots"]


def hash_slots(indices: Indices, num_slots: int, generator: np.random.Generator) -> np.ndarray:
    """Slots of indices, by a function drawn from a universal family.

    ``h(i) = ((a i + b) mod p) mod m``, p = 2^31 - 1 and a, b drawn from [1, p) and [0, p): two different
    indices fall into the same slot with a probability of at most about 1 / m.

    Args:
        indices: int32 [hits].
        num_slots: m.
        generator: draws a and b.

    Returns:
        int64 [hits], each in [0, m).

    Source: DRAGONN, Section 4.1; Carter & Wegman 1979.
    """
    prime = np.int64(2**31 - 1)
    a, b = generator.integers(1, prime), generator.integers(prime)
    # a i + b stays below 2^62, so int64 holds it
    return ((indices.astype(np.int64) * a + b) % prime) % num_slots


def write_slots(indices: Indices, slots: np.ndarray, num_slots: int) -> Indices:
    """One write for each hit, later ones overwrite: what is left in each slot, -1 where it is empty.

    Args:
        indices: int32 [hits], ascending.
        slots: int [hits], where each is written.
        num_slots: m.

    Returns:
        int32 [m].

    Example:
        >>> write_slots(np.array([3, 5, 9], np.int32), np.array([1, 0, 1]), 3)
        array([ 5,  9, -1], dtype=int32)
    """
    written = np.full(num_slots, -1, np.int32)
    written[slots] = indices  # of equal slots the last assignment stays
    return written


@dataclass(frozen=True, kw_only=True)
class DRAGONN(Sparsifier):
    """Each rank writes what passes a sampled threshold into m hashed slots, and sends those.

    ``slot[h(i)] = i`` for every hit i: one write each, no compaction, no second pass. Hits that fall into
    a taken slot overwrite it; the loser stays in the residual. One round: an allgather of m slots, always
    of the same length, which keeps Horovod's response cache on its fast path. Density is per rank.

    Args:
        density: k / n, in (0, 1].
        num_slots: m; k if left out. About 37 % of k slots stay empty when k hits are hashed into them.
        sample_fraction: share of elements in the sample behind the threshold.
        seed: of hash functions and samples; a new function is drawn in every step, so that the same two
            elements do not collide for ever.

    Source: DRAGONN (ICML 2022), Algorithm 1. Departures: empty slots are dropped by the sender and the
    message filled up to m, instead of sending -1 (the paper's decoder adds value 0 at index 0 for them:
    the same sum).

    Example:
        >>> DRAGONN(density=0.01, num_slots=512).describe()
        'dragonn:density=0.01,num_slots=512'
    """

    name: ClassVar[str] = "dragonn"

    num_slots: int | None = None
    sample_fraction: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        SampledThreshold(self.sample_fraction)
        if self.num_slots is not None and (not isinstance(self.num_slots, int) or self.num_slots < 1):
            raise ArgumentError("num_slots", self.num_slots, "a whole number of slots, 1 or more")

    def capacity(self, k: int) -> int:
        """m, the number of slots for k wanted elements."""
        return k if self.num_slots is None else self.num_slots

    def _message(self, num_slots: int) -> WireFormat:
        """The wire format with all messages as long as all slots."""
        return WireFormat(self.values, self.indices, num_slots)

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[SparseSum]:
        """One allgather; see `Sparsifier.synchronize`."""
        k = self.num_selected(info, state)
        m = self.capacity(k)
        generator = step_generator(self.seed, info.name, state.step, info.rank)
        threshold = 0.0
        if k < info.num_elements:
            threshold = SampledThreshold(self.sample_fraction).find(accumulator, k, generator)
        hits = accumulator.at_least(threshold)
        written = write_slots(hits, hash_slots(hits, m, generator), m)
        indices = np.sort(written[written >= 0])
        state.step += 1
        sum_ = yield from send_selection(accumulator, indices, info, self._message(m))
        sum_.facts.update(threshold=threshold, hits=float(hits.size), empty_slots=1.0 - indices.size / m)
        return sum_

    def rounds(self, size: int) -> tuple[type[Request], ...]:
        """One allgather."""
        return (AllGather,)

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """m slots of index and value, whatever was hit."""
        m = self.capacity(self.num_selected(info, SparsifierState(step)))
        num_bytes = self._message(m).message_bytes(
            int(counts[info.rank]), info.num_elements, info.value_dtype
        )
        return (Traffic(AllGather, num_bytes),)
