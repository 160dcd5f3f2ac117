"""DRAGONN: what passes a threshold is hashed into a fixed number of slots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays.protocol import Accumulator, Indices
from horovod_sparse.checks import check_count, check_number
from horovod_sparse.collectives import AllGather, Request, Synchronization
from horovod_sparse.sparsifiers.base import (
    BucketInfo,
    SparseSum,
    Sparsifier,
    SparsifierState,
    Traffic,
    send_selection,
)
from horovod_sparse.sparsifiers.hashing import HashFunction, survivors
from horovod_sparse.sparsifiers.randomness import step_generator
from horovod_sparse.thresholds.sampled import SampledThreshold
from horovod_sparse.wire import WireFormat

__all__ = ["DRAGONN"]


@dataclass(frozen=True, kw_only=True)
class DRAGONN(Sparsifier):
    """Each rank writes what passes a sampled threshold into m hashed slots, and sends those.

    ``slot[h(i)] = i`` for every hit i, one write each. Hits that fall into a taken slot overwrite it; the
    loser stays in the residual. One round: an allgather of m slots, of the same length whenever anything was
    hit, which keeps Horovod's response cache on its fast path. Density is per rank.

    The paper's point is that a GPU need not gather the hits. Here they are gathered where the gradient is, as
    for every threshold, and hashed on the host, about k of them: what is measured is the method, not that
    saving.

    Where m reaches n every element has a slot of its own (the identity is a hash function without
    collisions), so density 1 is dense.

    Args:
        density: k / n, in (0, 1].
        slots_per_selected: m / k, above 0. About 37 % of k slots stay empty when k hits are hashed into
            them, and as many hits wait for the next step.
        sample_fraction: share of elements in the sample behind the threshold.
        seed: of hash functions, orders of writing and samples; new ones are drawn in every step, so that
            the same two elements do not collide for ever, with the same outcome.

    Source: DRAGONN (ICML 2022), Algorithm 1. Departures: hits are gathered and hashed on the host; which
    write comes last is drawn, not left to the device; empty slots are dropped by the sender and the
    message filled up to m, instead of sending -1 (the paper's decoder adds value 0 at index 0 for them:
    the same sum); m is given in multiples of k, since buckets differ in size.

    Example:
        >>> DRAGONN(density=0.01, slots_per_selected=0.5).describe()
        'dragonn:density=0.01,slots_per_selected=0.5'
    """

    name: ClassVar[str] = "dragonn"

    slots_per_selected: float = 1.0
    sample_fraction: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        SampledThreshold(self.sample_fraction)
        allowed = "a number above 0: slots for each element that density asks for"
        check_number("slots_per_selected", self.slots_per_selected, allowed, low=0.0, high=2.0**31)
        check_count("seed", self.seed, "a whole number, 0 or more", low=0)

    def num_slots(self, info: BucketInfo, state: SparsifierState) -> int:
        """m."""
        k = self.num_selected(info, state)
        if k == info.num_elements:
            return k
        return min(info.num_elements, max(1, round(self.slots_per_selected * k)))

    def _message(self, num_slots: int) -> WireFormat:
        """The wire format with all messages as long as all slots."""
        return WireFormat(self.values, self.indices, math.ceil(num_slots / self.quantum) * self.quantum)

    def select(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> tuple[Indices, float]:
        """What is left in the slots, and the threshold."""
        k, m = self.num_selected(info, state), self.num_slots(info, state)
        generator = step_generator(self.seed, info.name, state.step, info.rank)
        threshold = 0.0
        if k < info.num_elements:
            threshold = SampledThreshold(self.sample_fraction).find(accumulator, k, generator)
        hits = accumulator.at_least(threshold)
        if m == info.num_elements:
            return hits, threshold
        slots = HashFunction.draw(generator, m).slots(hits)
        return survivors(hits, slots, m, int(generator.integers(max(1, hits.size)))), threshold

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[SparseSum]:
        """One allgather; see `Sparsifier.synchronize`."""
        m = self.num_slots(info, state)
        indices, threshold = self.select(accumulator, state, info)
        state.step += 1
        sum_ = yield from send_selection(accumulator, indices, info, self._message(m))
        sum_.facts.update(threshold=threshold, empty_slots=1.0 - indices.size / m)
        return sum_

    def rounds(self, size: int) -> tuple[type[Request], ...]:
        """One allgather."""
        return (AllGather,)

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """m slots of index and value, whatever was hit."""
        message = self._message(self.num_slots(info, SparsifierState(step)))
        num_bytes = message.message_bytes(int(counts[info.rank]), info.num_elements, info.value_dtype)
        return (Traffic(AllGather, num_bytes),)
