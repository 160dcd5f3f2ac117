"""How every element becomes a few bits: where its words lie, and the arithmetic that kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.kernels.lanes import LANES, Lanes, alike, broadcast, emitting, size_in, spread

#: elements whose bits of one kind are one word
WORD = 32
#: as many as a code can tell apart
MOST_LEVELS = 127
#: what an element is measured by, in a group
NORMS = ("mean", "max", "l2")


@dataclass(frozen=True)
class Quantization:
    """Elements in groups; each is a sign times a whole number of its group's unit.

    With s levels the unit is norm / s, the number at most s, and what lies between two is rounded to either
    at random, so that the expectation is the element itself. With signs alone the number is 1, the unit the
    norm.

    In words of 32 bits: the units of all groups as the accumulator's floats, then for every 32 elements one
    word for each bit of a code: the signs (1 for what is below 0), and the bits of the number, lowest first.
    Bit i of a word is of element i. The last words are filled up with zeros.

    Args:
        levels: s; 0 for signs alone.
        group: elements that share a unit, a multiple of 32; 0 for all of them.
        norm: of a group: "mean" of the magnitudes, the largest ("max"), or "l2".
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


#: A, B, C of a counter's hash, modulo 2^32, by the halves of a key: ``x = i A + low;  x ^= x >> 16;  x *= B;
#: x ^= high;  x ^= x >> 15;  x *= C;  x >> 8``
COUNTER, FIRST, SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B

_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)


@alike
def unsigned(builder: Any, lanes: Any) -> Any:
    return builder.bitcast(size_in(builder, lanes), lanes.type)


@emitting(lambda lanes: Lanes(types.float64)(lanes))
def doubled(builder: Any, lanes: Any) -> Any:
    if isinstance(lanes.type.element, ir.DoubleType):
        return lanes
    return builder.fpext(lanes, ir.VectorType(ir.DoubleType(), LANES))


@alike
def minus(builder: Any, left: Any, right: Any) -> Any:
    return builder.fsub(left, right)


@alike
def ones(builder: Any, lanes: Any) -> Any:
    return spread(ir.Constant(lanes.type.element, 1.0))


@emitting(lambda lanes: types.uint64(lanes))
def signs(builder: Any, lanes: Any) -> Any:
    """One bit per float lane, set where it is below 0."""
    below = builder.fcmp_ordered("<", lanes, ir.Constant(lanes.type, None))
    return builder.zext(builder.bitcast(below, ir.IntType(LANES)), ir.IntType(64))


@emitting(lambda bits, one, other: one(types.uint64, one, one))
def chosen(builder: Any, bits: Any, one: Any, other: Any) -> Any:
    """`one` in the lanes whose bit is set among the lowest, `other` in the rest."""
    few = builder.trunc(bits, ir.IntType(LANES))
    return builder.select(builder.bitcast(few, ir.VectorType(ir.IntType(1), LANES)), one, other)


@emitting(lambda like, start, low, high: like(like, types.int64, types.int64, types.int64))
def drawn(builder: Any, like: Any, start: Any, low: Any, high: Any) -> Any:
    """Random bits of the positions from start on, over 2^24, as float lanes: see `COUNTER`."""

    def constant(number: int) -> Any:
        return spread(ir.Constant(_INT, number))

    steps = ir.Constant(_INTS, [ir.Constant(_INT, lane) for lane in range(LANES)])
    first, low_bits, high_bits = (broadcast(builder, builder.trunc(one, _INT)) for one in (start, low, high))
    words = builder.add(first, steps)
    words = builder.add(builder.mul(words, constant(COUNTER)), low_bits)
    words = builder.xor(words, builder.lshr(words, constant(16)))
    words = builder.xor(builder.mul(words, constant(FIRST)), high_bits)
    words = builder.xor(words, builder.lshr(words, constant(15)))
    words = builder.lshr(builder.mul(words, constant(SECOND)), constant(8))
    floats = builder.sitofp(words, like.type)  # below 2^24: no sign is lost, and no bit
    return builder.fmul(floats, spread(ir.Constant(like.type.element, 2.0**-24)))


@emitting(lambda lanes, most: Lanes(types.int32)(lanes, types.int64))
def floored(builder: Any, lanes: Any, most: Any) -> Any:
    """Whole numbers below float lanes that are 0 or more, at most `most`: int32 lanes."""
    words, limit = builder.fptosi(lanes, _INTS), broadcast(builder, builder.trunc(most, _INT))
    return builder.select(builder.icmp_signed("<", words, limit), words, limit)


@emitting(lambda words, like: like(words, like))
def floats_of(builder: Any, words: Any, like: Any) -> Any:
    return builder.sitofp(words, like.type)


@emitting(lambda words, bit: types.uint64(words, types.int64))
def plane(builder: Any, words: Any, bit: Any) -> Any:
    """One bit per int32 lane: this one of its bits."""
    shifted = builder.lshr(words, broadcast(builder, builder.trunc(bit, _INT)))
    some = builder.trunc(shifted, ir.VectorType(ir.IntType(1), LANES))
    return builder.zext(builder.bitcast(some, ir.IntType(LANES)), ir.IntType(64))


@emitting(lambda bits, like: like(bits, like))
def bits_as_float(builder: Any, bits: Any, like: Any) -> Any:
    return builder.bitcast(bits, like.type)


@emitting(lambda number: types.float64(types.float64))
def coarse(builder: Any, number: Any) -> Any:
    """A float64 with 24 significant bits: what is left of it is the same in whatever order it was summed."""
    word = ir.IntType(64)
    bits = builder.add(builder.bitcast(number, word), ir.Constant(word, 1 << 28))
    return builder.bitcast(builder.and_(bits, ir.Constant(word, -(1 << 29))), ir.DoubleType())
