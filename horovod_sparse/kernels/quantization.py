"""Encodes every element in a few bits, and adds up all ranks' encoded elements; in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.errors import ArgumentError

#: elements whose bits at one position of their codes make one word
WORD = 32
#: the most levels that a code has room for
MOST_LEVELS = 127


@dataclass(frozen=True)
class Quantization:
    """Encodes elements in groups: each element is a sign times a whole number of its group's unit.

    With s levels the unit is the group's largest magnitude / s, the number at most s, and what lies between
    two is rounded to either at random, so that the expectation is the element itself. With signs alone the
    number is 1, the unit the mean magnitude.

    In words of 32 bits: the units of all groups as the accumulator's floats, then for every 32 elements one
    word for each bit of a code: the signs (1 for what is below 0), and the bits of the number, lowest first.
    Bit i of a word is of element i. The last words are filled up with zeros.

    Args:
        levels: s; 0 for signs alone.
        group: elements that share a unit, a multiple of 32; 0 for all of them.
    """

    levels: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        for name, value, most in (("levels", self.levels, MOST_LEVELS), ("group", self.group, 2**31 - WORD)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value <= most:
                raise ArgumentError(name, value, f"a whole number from 0 to {most}")
            object.__setattr__(self, name, int(value))
        if self.group % WORD:
            raise ArgumentError("group", self.group, f"a multiple of {WORD}, or 0 for all elements")

    @property
    def code_bits(self) -> int:
        """Returns the number of bits of an element's code."""
        return 1 + self.levels.bit_length()

    def length_of_group(self, num_elements: int) -> int:
        """Returns the number of elements of a group: all n without groups."""
        return self.group or max(1, num_elements)

    def num_units(self, num_elements: int) -> int:
        """Returns the number of groups of n elements; each group has one unit."""
        return -(-num_elements // self.length_of_group(num_elements))

    def unit_words(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        """Returns the number of 32-bit words that hold the units (scales) of n elements."""
        return self.num_units(num_elements) * (dtype.itemsize // 4)

    def num_words(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        """Returns the number of words that encode n elements of an accumulator's dtype."""
        return self.unit_words(num_elements, dtype) + self.code_bits * -(-num_elements // WORD)


#: A, B, C of a counter's hash, modulo 2^32, by the halves of a key: ``x = i A + low;  x ^= x >> 16;  x *= B;
#: x ^= high;  x ^= x >> 15;  x *= C;  x >> 8``
COUNTER, FIRST, SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B

#: elements that are worked on at once: intermediates stay in cache, and calls of NumPy are few
CHUNK = 1 << 16

Array = NDArray[Any]


def random_bits(words: Any, key: int) -> Any:
    """Returns a random number of 24 bits for each word, a hash of word and key, equal in NumPy and torch.

    Args:
        words: int32, of NumPy or torch: ``i A + low`` of `COUNTER`; overwritten.
        key: 64 bits.
    """
    words ^= (words >> 16) & 0xFFFF
    words *= as_int32(FIRST)
    words ^= as_int32(key >> 32)
    words ^= (words >> 15) & 0x1FFFF
    words *= as_int32(SECOND)
    words >>= 8
    words &= 0xFFFFFF
    return words


def as_int32(number: int) -> int:
    """Returns the low 32 bits of a number, read as an int32."""
    return ((number & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def windows(num_elements: int, length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yields windows [start, stop) of about `chunk` elements: whole groups of `length`, or parts of one."""
    several = max(1, chunk // length) * length
    for first in range(0, num_elements, several):
        last = min(first + several, num_elements)
        for start in range(first, last, chunk):
            yield start, min(start + chunk, last)


def repeat_by_group(by_group: Array, start: int, stop: int, length: int) -> Array:
    """Returns for each element of a window the value of its group (of `length` elements) in `by_group`."""
    own = by_group[start // length : -(-stop // length)]
    if own.size == 1:
        return own
    return np.broadcast_to(own[:, None], (own.size, length)).reshape(-1)[: stop - start]


def _norms(values: Array, code: Quantization) -> NDArray[np.float64]:
    """Returns each group's largest magnitude, or with signs alone its mean magnitude.

    A mean has 24 significant bits: no order of sums changes it.
    """
    n, length = values.size, code.length_of_group(values.size)
    found, counts = np.zeros(code.num_units(n)), np.full(code.num_units(n), length)
    counts[-1:] += n - counts.sum()
    for start, stop in windows(n, length, CHUNK):
        sizes, groups = np.abs(values[start:stop]), slice(start // length, -(-stop // length))
        starts = np.arange(0, stop - start, length)
        if code.levels:
            found[groups] = np.maximum(found[groups], np.maximum.reduceat(sizes, starts))
        else:
            found[groups] += np.add.reduceat(sizes.astype(np.float64), starts)
    if code.levels:
        return found
    found /= counts
    for group in np.flatnonzero(~np.isfinite(found) | (found == 0.0)).tolist():
        sizes = np.abs(values[group * length : (group + 1) * length]).astype(np.float64)
        top = sizes.max(initial=0.0)
        sizes /= top or 1.0
        found[group] = top * sizes.mean()
    coarse = ((found.view(np.int64) + (1 << 28)) & -(1 << 29)).view(np.float64)
    return np.where((found > 1e-300) & np.isfinite(found), coarse, found)


@np.errstate(all="ignore")
def encode(values: Array, code: Quantization, key: int, words: NDArray[np.int32]) -> Array:
    """Writes units and codes of all values to `words`, and returns the rounding errors."""
    n, length, at = values.size, code.length_of_group(values.size), code.unit_words(values.size, values.dtype)
    rest, codes = np.empty_like(values), words[at:].view(np.uint32).reshape(-1, code.code_bits)
    largest = float(np.finfo(values.dtype).max)
    units = np.minimum(_norms(values, code) / max(1, code.levels), largest).astype(values.dtype)
    inverse = 1 / units
    if code.levels:  # a unit so small that its inverse is no number: all of it stays
        units[~np.isfinite(inverse)] = inverse[~np.isfinite(inverse)] = 0
    words[:at] = units.view(np.int32)
    counters = np.arange(CHUNK, dtype=np.int32) * np.int32(as_int32(COUNTER))
    for start, stop in windows(n, length, CHUNK):
        part = values[start:stop]
        negative = (part < 0).view(np.uint8)
        planes, numbers = [negative], np.ones(part.size, np.uint8)
        if code.levels:
            sizes = np.abs(part)
            sizes *= repeat_by_group(inverse, start, stop, length)
            counted = counters[: part.size] + np.int32(as_int32(start * COUNTER + key))
            bits = random_bits(counted, key).astype(values.dtype)
            bits *= values.dtype.type(2.0**-24)
            sizes += bits
            numbers = sizes.astype(np.uint8)
            numbers -= numbers > code.levels  # where a unit was rounded down
            planes += [numbers & np.uint8(1 << place) for place in range(code.code_bits - 1)]
        here = codes[start // WORD : -(-stop // WORD)]
        for place, plane in enumerate(planes):
            padded = np.pad(plane, (0, -plane.size % WORD)) if plane.size % WORD else plane
            here[:, place] = np.packbits(padded, bitorder="little").view(np.uint32)
        np.subtract(part, _dequantize(numbers, negative, units, start, length), out=rest[start:stop])
    return rest


@np.errstate(all="ignore")
def decode_sum(messages: NDArray[np.int32], code: Quantization, out: Array) -> NDArray[Any]:
    """Writes the sum of all ranks' messages [P, words], in rank order, to `out`; returns all units."""
    n, length, at = out.size, code.length_of_group(out.size), code.unit_words(out.size, out.dtype)
    units = np.ascontiguousarray(messages[:, :at]).view(out.dtype)
    codes = messages[:, at:].view(np.uint32).reshape(len(messages), -1, code.code_bits)
    for start, stop in windows(n, length, CHUNK):
        total = np.zeros(stop - start, out.dtype)
        for rank, here in enumerate(codes[:, start // WORD : -(-stop // WORD)]):
            negative, *bits = (unpack_bits(here[:, place], stop - start) for place in range(code.code_bits))
            numbers = bits.pop() if bits else np.ones_like(negative)
            for plane in reversed(bits):  # faster than shifts
                numbers += numbers
                numbers += plane
            total += _dequantize(numbers, negative, units[rank], start, length)
        out[start:stop] = total
    return units


def unpack_bits(words: NDArray[np.uint32], count: int) -> NDArray[np.uint8]:
    """Returns the first `count` bits of the words, lowest first, each as a byte of 0 or 1."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), count=count, bitorder="little")


def _dequantize(
    numbers: NDArray[np.uint8], negative: NDArray[np.uint8], units: Array, start: int, length: int
) -> Array:
    """Returns numbers times their groups' units, negated where `negative` is 1; overwrites both arrays."""
    np.negative(negative, out=negative)
    numbers ^= negative
    numbers -= negative
    floats = numbers.view(np.int8).astype(units.dtype)
    floats *= repeat_by_group(units, start, start + numbers.size, length)
    return floats
