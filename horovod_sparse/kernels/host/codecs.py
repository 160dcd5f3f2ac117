"""Ascending indices into few bits and back, and values into float16, bfloat16, int8 and two bits.

All arrays are one-dimensional views of int32 buffers: `words` as uint32, `offsets` as uint16, half
types as int16 or uint16. What is read was written by another rank, so each decoder of indices proves
that it stays inside before it looks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.lanes import count_bits, first_bit, raw_bits, read

#: An index within a block of 2**16 elements is a 16-bit number.
BLOCK_BITS = 16


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


@kernel
def encode_blocks(indices, counts, offsets):  # type: ignore[no-untyped-def]
    """The lower 16 bits of every index, and how many indices each block of 2**16 elements has."""
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


#: Values that share a scale.
INT8_BLOCK = 64

_ONE = np.uint32(1)

# Adding and taking off again rounds a float64 to the nearest integer, ties to even.
_TO_INTEGER = 1.5 * 2.0**52
# A scale has 17 significant bits: 127 times it is then exact in float32, and so is every decoded value.
_UNUSED_BITS = 0x7F
_LARGEST_SCALE = int((np.finfo(np.float32).max / np.float32(127)).view(np.uint32)) & ~_UNUSED_BITS
_SMALLEST_SCALE = 0x00800000  # 2**-126; below it, some processors are set to take 0


@kernel
def decode_half(bits, out):  # type: ignore[no-untyped-def]
    """float16 (bits as int16) or bfloat16 (as uint16) to float32 or float64; exact."""
    for i in range(out.size):
        out[i] = read(bits, i)


@kernel
def encode_int8(values, scale_bits, scales, codes):  # type: ignore[no-untyped-def]
    """Whole multiples, from -127 to 127, of one scale per block of `INT8_BLOCK` values.

    scale = max |value| / 127, rounded up to 17 significant bits; 0 where it would be subnormal, and
    then the block decodes to zeros. Values above the largest scale's reach saturate; NaN becomes 0.
    """
    for block in range(scales.size):
        begin = block * INT8_BLOCK
        end = min(begin + INT8_BLOCK, values.size)
        largest = 0.0
        for i in range(begin, end):
            size = abs(np.float64(values[i]))
            largest = size if size > largest else largest  # no NaN passes this
        bits = (np.int64(raw_bits(np.float32(largest / 127.0))) + _UNUSED_BITS) & ~_UNUSED_BITS
        bits = min(bits, _LARGEST_SCALE)
        if bits < _SMALLEST_SCALE:
            scale_bits[block] = 0
            codes[begin:end] = 0
            continue
        scale_bits[block] = bits
        scale = np.float64(scales[block])
        for i in range(begin, end):
            value = np.float64(values[i]) if values[i] == values[i] else 0.0
            quotient = max(-127.0, min(127.0, value / scale))
            codes[i] = np.int8((quotient + _TO_INTEGER) - _TO_INTEGER)


@kernel
def decode_int8(codes, scales, out):  # type: ignore[no-untyped-def]
    """The inverse of `encode_int8`: code * scale, exact in float32."""
    for block in range(scales.size):
        scale = scales[block]
        for i in range(block * INT8_BLOCK, min((block + 1) * INT8_BLOCK, out.size)):
            out[i] = np.float32(codes[i]) * scale


#: Values that share two magnitudes.
TWO_BIT_BLOCK = 64
_LARGEST_SIZE = float(np.uint32(0x7F7F0000).view(np.float32))  # of bfloat16, as which magnitudes travel


@kernel
def _size(value):  # type: ignore[no-untyped-def]
    """The magnitude as float64, at most the largest bfloat16; 0 for NaN."""
    size = min(abs(np.float64(value)), _LARGEST_SIZE)
    return size if size == size else 0.0


@kernel
def encode_2bit(values, sizes, signs, larges):  # type: ignore[no-untyped-def]
    """The sign of every value, and which of two magnitudes per block of `TWO_BIT_BLOCK` values it has.

    Values are split at the mean magnitude of their block; `sizes` are the means of those up to it and of
    those above. Both are what leaves the least squares of those values.
    """
    for block in range(sizes.size // 2):
        begin = block * TWO_BIT_BLOCK
        end = min(begin + TWO_BIT_BLOCK, values.size)
        total = 0.0
        for i in range(begin, end):
            total += _size(values[i])
        mean = total / (end - begin)
        small, large, above = 0.0, 0.0, 0
        for word in range(begin >> 5, (end + 31) >> 5):
            negative, bigger = np.uint32(0), np.uint32(0)
            for i in range(word << 5, min((word + 1) << 5, end)):
                size = _size(values[i])
                over = np.uint32(size > mean)  # no branch: which half a value is in is a coin toss
                negative |= np.uint32(values[i] < 0) << np.uint32(i & 31)
                bigger |= over << np.uint32(i & 31)
                large += size if over else 0.0
                small += 0.0 if over else size
                above += over
            signs[word], larges[word] = negative, bigger
        sizes[2 * block] = small / max(end - begin - above, 1)
        sizes[2 * block + 1] = large / max(above, 1)


@kernel
def decode_2bit(sizes, signs, larges, out):  # type: ignore[no-untyped-def]
    """The inverse of `encode_2bit`; there is no -0."""
    for word in range(signs.size):
        begin = word << 5
        block = 2 * (begin // TWO_BIT_BLOCK)
        small, large = sizes[block], sizes[block + 1]
        sign, bigger = signs[word], larges[word]
        for bit in range(np.uint64(min(32, out.size - begin))):
            size = large if (bigger >> np.uint32(bit)) & _ONE else small
            out[np.uint64(begin) + bit] = np.float32(0.0) - size if (sign >> np.uint32(bit)) & _ONE else size
