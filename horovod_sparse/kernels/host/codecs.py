"""Writes ascending indices in few bits, and reads them back.

`words` is a view of an int32 buffer as uint32. Another rank wrote the words that a decoder reads, so the
decoder proves that it stays inside before it looks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.lanes import count_bits, first_bit


@intrinsic
def _word(typingctx: Any, words: Any, index: Any) -> Any:
    """words[index] as int64, without wraparound."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(context.make_array(words)(context, builder, args[0]).data, [args[1]])
        return builder.zext(builder.load(pointer), ir.IntType(64))

    return types.int64(words, types.intp), codegen


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
    """Elias-Fano: `low_bits` of every index; bit (index >> low_bits) + i of the rest is set for the i-th."""
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
    ones = 0
    for at in range(low_words, words.size):
        ones += count_bits(_word(words, at))
    if ones != count:
        return False
    mask = (1 << low_bits) - 1
    # unsigned: nothing looks whether a place is below 0
    i, base, bit, previous, wrong = np.uint64(0), 0, 0, -1, False
    for at in range(low_words, words.size, 2):  # two words at once: half as many ends to foresee
        pending = np.uint64(_word(words, at))
        if at + 1 < words.size:
            pending |= np.uint64(_word(words, at + 1)) << np.uint64(32)
        while pending:
            low = ((_word(words, bit >> 5) | _word(words, (bit >> 5) + 1) << 32) >> (bit & 31)) & mask
            index = (base + first_bit(pending)) << low_bits | low
            wrong |= index <= previous
            previous = index
            out[i] = index
            i += np.uint64(1)
            base -= 1
            bit += low_bits
            pending &= pending - np.uint64(1)
        base += 64
    return not wrong and previous < num_elements
