"""Writes ascending indices in few bits, and reads them back.

`words` is a view of an int32 buffer as uint32. Another rank wrote the words that a decoder reads, so the
decoder proves that it stays inside before it looks.
"""

from __future__ import annotations

import numpy as np

from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.lanes import count_bits, first_bit, read


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
        ones += count_bits(np.int64(read(words, at)))
    if ones != count:
        return False
    mask = (1 << low_bits) - 1
    # unsigned: nothing looks whether a place is below 0
    i, base, bit, previous, wrong = np.uint64(0), 0, 0, -1, False
    for at in range(low_words, words.size, 2):  # two words at once: half as many ends to foresee
        pending = np.uint64(np.int64(read(words, at)))
        if at + 1 < words.size:
            pending |= np.uint64(np.int64(read(words, at + 1))) << np.uint64(32)
        while pending:
            pair = np.int64(read(words, bit >> 5)) | np.int64(read(words, (bit >> 5) + 1)) << 32
            low = (pair >> (bit & 31)) & mask
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
