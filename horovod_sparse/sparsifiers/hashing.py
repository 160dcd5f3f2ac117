"""Hash functions from a universal family, and the slots that they fill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_sparse.arrays.protocol import Indices

__all__ = ["HashFunction", "survivors"]


@dataclass(frozen=True)
class HashFunction:
    """``h(i) = mix((a i + b) mod 2^64 >> 32) m >> 32`` for i in [0, 2^32) and slots [0, m).

    With a and b drawn from [0, 2^64) the 32 high bits of a i + b are strongly universal: those of two
    different indices are independent and uniform. A bijection (the mix) leaves them so, and the last step
    gives every slot as many of the 2^32 words as any other, but for one. Hence two different indices fall
    into the same slot with a probability of at most ``1 / m + m / 2^64``.

    The mix is there for what universality does not promise. A linear function sends indices in a row, as
    a layer with large gradients selects them, to an arithmetic progression, which fills slots far more
    evenly, or far less, than chance. With the mix the share of empty slots is that of chance for
    indices in a row as well as for scattered ones.

    Args:
        multiplier: a, in [0, 2^64).
        offset: b, in [0, 2^64).
        num_slots: m, in [1, 2^32).

    Source: DRAGONN, Section 4.1 and Definition A.4, which name no family; Dietzfelbinger 1996 for the
    linear part; the mix multiplies by odd numbers and folds high bits into low ones.

    Example:
        >>> int(HashFunction.draw(np.random.default_rng(0), 4).slots(np.arange(99, dtype=np.int32)).max())
        3
    """

    multiplier: int
    offset: int
    num_slots: int

    @classmethod
    def draw(cls, generator: np.random.Generator, num_slots: int) -> HashFunction:
        """A function of the family."""
        a, b = generator.integers(0, 2**64, 2, np.uint64)
        return cls(int(a), int(b), num_slots)

    def slots(self, indices: Indices) -> np.ndarray:
        """The slots of indices.

        Args:
            indices: int32 [hits], 0 or more.

        Returns:
            int64 [hits], each in [0, m).
        """
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
    """One write for each hit, later ones overwrite: the hits that are left in the slots at the end.

    Args:
        indices: int32 [hits], ascending.
        slots: int64 [hits], where each is written.
        num_slots: m.
        last: position of the hit that is written last; the others are written in ascending order, around
            the circle. With the same one in all steps, and few slots, some hits would never be left.

    Returns:
        int32, ascending; at most m.

    Example:
        >>> survivors(np.array([3, 5, 9], np.int32), np.array([1, 0, 1]), 3)
        array([5, 9], dtype=int32)
        >>> survivors(np.array([3, 5, 9], np.int32), np.array([1, 0, 1]), 3, last=0)
        array([3, 5], dtype=int32)
    """
    if not indices.size:
        return indices
    turns = (np.arange(indices.size) - (last + 1)) % indices.size
    written = np.full(num_slots, -1, np.int64)
    # plain assignment does not promise which of several writes stays
    np.maximum.at(written, slots, turns)
    return indices[written[slots] == turns]
