"""Ascending indices into few bits and back.

All arrays are one-dimensional views of int32 buffers: `words` as uint32, `offsets` as uint16. What
is read was written by another rank, so each decoder proves that it stays inside before it looks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from horovod_sparse.kernels.compile import kernel

__all__ = ["BLOCK_BITS", "decode_blocks", "decode_gaps", "encode_blocks", "encode_gaps", "find_descent"]

#: An index within a block of 2**16 elements is a 16-bit number.
BLOCK_BITS = 16


@intrinsic
def _word(typingctx: Any, words: Any, index: Any) -> Any:
    """words[index] as int64, without wraparound."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(context.make_array(words)(context, builder, args[0]).data, [args[1]])
        return builder.zext(builder.load(pointer), ir.IntType(64))

    return types.int64(words, types.intp), codegen


@intrinsic
def _first_bit(typingctx: Any, word: Any) -> Any:
    """Position of the lowest bit set in an int64 that is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), codegen


@intrinsic
def _count_bits(typingctx: Any, word: Any) -> Any:
    """How many bits of an int64 are set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.int64), codegen


@kernel
def find_descent(indices, num_elements):  # type: ignore[no-untyped-def]
    """Position of the first index that is not larger than the one before, or outside [0, n); or -1."""
    previous, wrong = -1, False
    for i in range(indices.size):
        wrong |= indices[i] <= previous
        previous = indices[i]
    if not wrong and previous < num_elements:
        return -1
    previous = -1
    for i in range(indices.size):
        if not previous < indices[i] < num_elements:
            return i
        previous = indices[i]
    return -1


@kernel
def encode_gaps(indices, low_bits, low_words, words):  # type: ignore[no-untyped-def]
    """Elias-Fano: `low_bits` of every index side by side, the rest as gaps in unary.

    Bit (index >> low_bits) + i of the upper part is set for the i-th index.

    Args:
        indices: int32, strictly ascending and inside (`find_descent` said so).
        low_bits: 0 to 31.
        low_words: words of the lower part.
        words: uint32, zeros, long enough for both parts.
    """
    mask = (1 << low_bits) - 1
    pending, filled, at = 0, 0, 0
    if low_bits:
        for i in range(indices.size):
            pending |= (np.int64(indices[i]) & mask) << filled
            words[at] = np.uint32(pending)
            filled += low_bits
            full = filled >> 5
            pending >>= full << 5
            at += full
            filled &= 31
        if filled:  # what the last index began a word with
            words[at] = np.uint32(pending)
    pending, at = 0, 0
    for i in range(indices.size):
        position = (np.int64(indices[i]) >> low_bits) + i
        pending = (pending if position >> 5 == at else 0) | (1 << (position & 31))
        at = position >> 5
        words[low_words + at] = np.uint32(pending)


@kernel
def decode_gaps(words, count, low_bits, low_words, num_elements, out):  # type: ignore[no-untyped-def]
    """The inverse of `encode_gaps`.

    Args:
        words: uint32, both parts and nothing behind them; the upper part has one word or more.
        out: int32 [count], overwritten.

    Returns:
        Whether the words stand for `count` ascending indices below num_elements.
    """
    ones = 0
    for at in range(low_words, words.size):
        ones += _count_bits(_word(words, at))
    if ones != count:
        return False
    mask = (1 << low_bits) - 1
    i, bit, previous, wrong = 0, 0, -1, False
    for at in range(low_words, words.size):
        pending = _word(words, at)
        base = (at - low_words) << 5
        while pending:
            low = ((_word(words, bit >> 5) | _word(words, (bit >> 5) + 1) << 32) >> (bit & 31)) & mask
            index = (base + _first_bit(pending) - i) << low_bits | low
            wrong |= index <= previous
            previous = index
            out[i] = index
            i += 1
            bit += low_bits
            pending &= pending - 1
    return not wrong and previous < num_elements


@kernel
def encode_blocks(indices, counts, offsets):  # type: ignore[no-untyped-def]
    """The lower 16 bits of every index, and how many indices each block of 2**16 elements has.

    Args:
        indices: int32, strictly ascending and inside.
        counts: uint32 [blocks], zeros.
        offsets: uint16, at least as long as indices.
    """
    for i in range(indices.size):
        offsets[i] = np.uint16(indices[i])
    begin = 0
    for block in range(counts.size):
        border = (np.int64(block) + 1) << BLOCK_BITS
        step, end = 1, begin
        while end + step <= indices.size and indices[end + step - 1] < border:
            end += step
            step <<= 1
        while step:
            if end + step <= indices.size and indices[end + step - 1] < border:
                end += step
            step >>= 1
        counts[block] = end - begin
        begin = end


@kernel
def decode_blocks(counts, offsets, num_elements, out):  # type: ignore[no-untyped-def]
    """The inverse of `encode_blocks`.

    Args:
        out: int32 [count], overwritten; offsets has as many elements, or more.

    Returns:
        Whether the counts add up, and the indices are ascending and below num_elements.
    """
    total = 0
    for block in range(counts.size):
        total += np.int64(counts[block])
    if total != out.size:
        return False
    begin = 0
    for block in range(counts.size):
        base = block << BLOCK_BITS
        end = begin + np.int64(counts[block])
        for i in range(begin, end):
            out[i] = base | np.int64(offsets[i])
        begin = end
    previous, wrong = np.int32(-1), False
    for i in range(out.size):
        wrong |= out[i] <= previous
        previous = out[i]
    return not wrong and previous < num_elements
