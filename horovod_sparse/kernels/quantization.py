"""How every element becomes a few bits: the arithmetic that quantizers share, and where its words lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.errors import ArgumentError, UnknownNameError

#: elements whose bits of one kind are one word
WORD = 32
#: as many as a code can tell apart
MOST_LEVELS = 127
#: what an element is measured by, in a group
NORMS = ("mean", "max", "l2")


@dataclass(frozen=True)
class Quantization:
    """Elements in groups; each is a sign times a whole number of its group's unit.

    With signs alone (``levels=0``) that number is 1, and the unit is the group's norm. With s levels the unit
    is norm / s, the number at most s, and what lies between two is rounded to either at random, so that the
    expectation is the element itself.

    In words of 32 bits: the units of all groups as the accumulator's floats, then for every 32 elements one
    word for each bit of a code: the signs (1 for what is below 0), and the bits of the number, lowest first.
    Bit i of a word is of element i. The last words are filled up with zeros.

    Args:
        levels: s; 0 for signs alone.
        group: elements that share a unit, a multiple of 32; 0 for all of them.
        norm: of a group: "mean" of the magnitudes, the largest ("max"), or "l2".

    Example:
        >>> four_bits = Quantization(levels=7, group=512)
        >>> four_bits.planes, four_bits.num_words(1000, np.dtype(np.float32))
        (4, 130)
    """

    levels: int = 0
    group: int = 0
    norm: str = "mean"

    def __post_init__(self) -> None:
        for name, value, most in (("levels", self.levels, MOST_LEVELS), ("group", self.group, 2**31 - WORD)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value <= most:
                raise ArgumentError(name, value, f"a whole number from 0 to {most}")
            object.__setattr__(self, name, int(value))
        if self.group % WORD:
            raise ArgumentError("group", self.group, f"a multiple of {WORD}, or 0 for all elements")
        if self.norm not in NORMS:
            raise UnknownNameError("norm of a quantizer", str(self.norm), NORMS)

    @property
    def planes(self) -> int:
        """Bits of an element."""
        return 1 + self.levels.bit_length()

    def length_of_group(self, num_elements: int) -> int:
        """Elements of a group, of n elements in all; 1 or more."""
        return self.group or max(1, num_elements)

    def num_units(self, num_elements: int) -> int:
        """Groups of n elements."""
        return -(-num_elements // self.length_of_group(num_elements))

    def unit_words(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        """Words that the units of n elements of an accumulator's dtype take."""
        return self.num_units(num_elements) * (dtype.itemsize // 4)

    def num_words(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        """Words that n elements of an accumulator's dtype become."""
        return self.unit_words(num_elements, dtype) + self.planes * -(-num_elements // WORD)


#: of a counter's hash: one odd number for the counter, two for the mix
COUNTER, FIRST, SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


def random_bits(start: int, stop: int, key: int) -> np.ndarray:
    """24 random bits for every position, as `kernels.host.quantize` draws them: plain NumPy.

    ``x = i A + low;  x ^= x >> 16;  x *= B;  x ^= high;  x ^= x >> 15;  x *= C;  x >> 8``, modulo 2^32.

    Args:
        start: first position.
        stop: behind the last.
        key: 64 bits, `low` and `high`.

    Returns:
        uint32 [stop - start], below 2^24.

    Example:
        >>> drawn = random_bits(0, 100_000, 2024) / 2**24
        >>> bool(abs(drawn.mean() - 0.5) < 0.005), bool(abs(drawn.var() - 1 / 12) < 0.001)
        (True, True)
    """
    words = np.arange(start, stop, dtype=np.uint32)
    words *= np.uint32(COUNTER)
    words += np.uint32(key & 0xFFFFFFFF)
    words ^= words >> np.uint32(16)
    words *= np.uint32(FIRST)
    words ^= np.uint32(key >> 32)
    words ^= words >> np.uint32(15)
    words *= np.uint32(SECOND)
    drawn: np.ndarray = words >> np.uint32(8)
    return drawn
