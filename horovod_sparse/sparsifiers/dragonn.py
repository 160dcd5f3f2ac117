"""DRAGONN: elements above a threshold are hashed into a fixed number of slots."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays import Accumulator, Indices
from horovod_sparse.checks import check_number
from horovod_sparse.sparsifiers.base import BucketInfo, Selected, SparsifierState
from horovod_sparse.sparsifiers.dgc import SampledSelection
from horovod_sparse.wire import WireFormat


@dataclass(frozen=True)
class HashFunction:
    """A random hash function ``h(i) = mix((a i + b) mod 2^64 >> 32) m >> 32`` of indices to the slots [0, m).

    With a and b drawn from [0, 2^64) the 32 high bits of a i + b are strongly universal, and a bijection (the
    mix) leaves them so: two different indices fall into one slot with a probability of at most ``1 / m + m /
    2^64``. A linear function alone sends indices in a row, as a layer with large gradients selects them, to
    an arithmetic progression, which fills slots more evenly, or less, than chance: hence the mix.

    Source: DRAGONN, Section 4.1 and Definition A.4, which name no family; Dietzfelbinger 1996 for the linear
    part.
    """

    multiplier: int
    offset: int
    num_slots: int

    @classmethod
    def draw(cls, generator: np.random.Generator, num_slots: int) -> HashFunction:
        a, b = generator.integers(0, 2**64, 2, np.uint64)
        return cls(int(a), int(b), num_slots)

    def slots(self, indices: Indices) -> np.ndarray:
        words = indices.astype(np.uint64)
        words *= np.uint64(self.multiplier)
        words += np.uint64(self.offset)
        words >>= np.uint64(32)
        words ^= words >> np.uint64(16)
        for factor, shift in ((0x7FEB352D, 15), (0x846CA68B, 16)):
            words *= np.uint64(factor)
            words &= np.uint64(0xFFFFFFFF)
            words ^= words >> np.uint64(shift)
        words *= np.uint64(self.num_slots)
        words >>= np.uint64(32)
        return words.astype(np.int64)


def survivors(indices: Indices, slots: np.ndarray, num_slots: int, last: int = -1) -> Indices:
    """Writes each index into its slot, and returns the indices that no later write to the same slot replaced.

    The hit at `last` is written last; the others are written in ascending order, around the circle. With the
    same one in all steps, and few slots, some hits would never be left.
    """
    if not indices.size:
        return indices
    turns = (np.arange(indices.size) - (last + 1)) % indices.size
    written = np.full(num_slots, -1, np.int64)
    # plain assignment does not promise which of several writes stays
    np.maximum.at(written, slots, turns)
    return indices[written[slots] == turns]


@dataclass(frozen=True, kw_only=True)
class DRAGONN(SampledSelection):
    """Each rank hashes the elements above a sampled threshold into m slots, and sends the slots.

    ``slot[h(i)] = i`` for every hit i, one write each. Hits that fall into a taken slot overwrite it; the
    loser stays in the residual. One round: an allgather of m slots, of the same length whatever was hit,
    which keeps Horovod's response cache on its fast path. Density is per rank.

    The paper's point is that a GPU need not gather the hits. Here they are gathered where the gradient is, as
    for every threshold, and hashed on the host, about k of them: what is measured is the method, not that
    saving.

    Where m reaches n every element has a slot of its own (the identity is a hash function without
    collisions), so density 1 is dense.

    Args:
        slots_per_selected: m / k, above 0. About 37 % of k slots stay empty when k hits are hashed into
            them, and as many hits wait for the next step.
        sample_fraction: share of elements in the sample behind the threshold.
        seed: of hash functions, orders of writing and samples; new ones are drawn in every step, so that
            the same two elements do not collide for ever, with the same outcome.

    Source: DRAGONN (ICML 2022), Algorithm 1. Departures: hits are gathered and hashed on the host; which
    write comes last is drawn, not left to the device; empty slots are dropped by the sender and the
    message filled up to m, instead of sending -1 (the paper's decoder adds value 0 at index 0 for them:
    the same sum); m is given in multiples of k, since buckets differ in size.
    """

    name: ClassVar[str] = "dragonn"

    slots_per_selected: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = "a number above 0: slots for each element that density asks for"
        check_number("slots_per_selected", self.slots_per_selected, allowed, f"(0, {2**31}]")

    def num_slots(self, info: BucketInfo, step: int) -> int:
        """Returns m, the number of slots of a bucket in a step."""
        k = self.num_selected(info, step)
        if k == info.num_elements:
            return k
        return min(info.num_elements, max(1, round(self.slots_per_selected * k)))

    def message_format(self, info: BucketInfo, step: int) -> WireFormat:
        """Returns a format with room for all slots, so that all messages have the same length."""
        return dataclasses.replace(self.wire, capacity=self.num_slots(info, step))

    def select(self, accumulator: Accumulator, k: int, state: SparsifierState, info: BucketInfo) -> Selected:
        m, threshold = self.num_slots(info, state.step), 0.0
        generator = self.generator(info, state.step)
        if k < info.num_elements:
            threshold = self.sampled_threshold(accumulator, k, generator)
        indices = accumulator.at_least(threshold)
        if m < info.num_elements:
            slots = HashFunction.draw(generator, m).slots(indices)
            last = int(generator.integers(max(1, indices.size)))
            indices = survivors(indices, slots, m, last)
        return Selected(indices, {"threshold": threshold, "empty_slots": 1.0 - indices.size / m})
