"""Codecs of indices and values: 32 or fewer bits an index, 64, 32, 16 or 2 bits a value.

The length of each is a function of the count (and of n) alone, which never falls when the count grows. So a
message of a fixed count has a fixed length, a declared cost is exact, and a corrupted length is noticed.

A value that was written is always finite: what is beyond the largest number saturates, NaN becomes 0.
The sender keeps the difference in its residual (`WireFormat.round`), so nothing is lost for good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays import Indices, Values
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host import sparse_vectors as kernels
from horovod_sparse.kernels.host.scatter import find_outside, narrow, widen

Words: TypeAlias = NDArray[np.uint32]


class Int32:
    """Encodes indices as they are, in any order: one word each."""

    code = 0

    def num_words(self, count: int, num_elements: int) -> int:
        """Returns how many words `count` indices below `num_elements` take; a larger count takes no fewer."""
        return count

    def encode(self, indices: Indices, num_elements: int, words: Words) -> None:
        """Writes the indices into `words`, which is `num_words` long."""
        words.view(np.int32)[:] = indices

    def decode(self, words: Words, num_elements: int, out: Indices) -> bool:
        """Writes the decoded indices into `out`; returns False if `words` does not encode so many."""
        out[:] = words.view(np.int32)
        return find_outside(out, num_elements) < 0


class Gaps:
    """Encodes ascending indices in Elias-Fano code: about 2 + log2(n / count) bits each, 12 at density 0.001.

    The lower l bits of every index stand side by side. What is left of it, index >> l, grows slowly:
    its growth is written in unary, as bit (index >> l) + i of a second part for the i-th index.

    ``bits = count * l + count + ((n - 1) >> l),  words = ceil(bits / 32) + 1``

    l is the one that makes this smallest. Entropy is log2(n / count) + 1.44 bits, so half a bit per
    index is given away; for it, the length is known before coding, which Golomb codes cannot say.

    Source: Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", 1974.
    Departure: no table for access in the middle, since messages are always read from the front.

    Example:
        By hand: n = 16 and three indices give l = 2. Lower parts of 5, 6 and 13 are 01, 10, 01, lowest
        bit first in the word: 0b011001. Upper parts are 1, 1 and 3, so bits 1 + 0, 1 + 1 and 3 + 2.

        >>> words = np.zeros(Gaps().num_words(3, 16), np.uint32)
        >>> Gaps().encode(np.array([5, 6, 13], np.int32), 16, words)
        >>> [bin(word) for word in words]
        ['0b11001', '0b100110']
    """

    code = 1

    def num_words(self, count: int, num_elements: int) -> int:
        """Returns how many words `count` indices take: their low bits, then the rest in unary."""
        if count == 0:
            return 0
        low = low_bits(count, num_elements)
        return -(-(count * (low + 1) + ((num_elements - 1) >> low)) // 32) + 1

    def encode(self, indices: Indices, num_elements: int, words: Words) -> None:
        _check_ascending(indices, num_elements)
        if indices.size:
            words[:] = 0
            low = low_bits(indices.size, num_elements)
            kernels.encode_gaps(indices, low, _low_words(indices.size, low), words)

    def decode(self, words: Words, num_elements: int, out: Indices) -> bool:
        if out.size == 0:
            return True
        low = low_bits(out.size, num_elements)
        low_words = _low_words(out.size, low)
        return bool(kernels.decode_gaps(words, out.size, low, low_words, num_elements, out))


def low_bits(count: int, num_elements: int) -> int:
    """Returns the number l of low bits per index for which the code is shortest.

    One bit more costs `count` bits and takes off ceil(((n - 1) >> l) / 2), which falls with l; so l
    grows as long as (n - 1) >> l is above 2 * count.
    """
    return ((num_elements - 1) // (2 * count + 1)).bit_length()


def _low_words(count: int, low: int) -> int:
    return -(-count * low // 32)


def _check_ascending(indices: Indices, num_elements: int) -> None:
    wrong = indices >= num_elements
    wrong[:1] |= indices[:1] < 0
    wrong[1:] |= indices[1:] <= indices[:-1]
    if wrong.any():
        position = int(np.argmax(wrong))
        before = "" if position == 0 else f" after {int(indices[position - 1])}"
        raise ArgumentError(
            "indices",
            f"{int(indices[position])}{before} (position {position})",
            f'strictly ascending indices within [0, {num_elements}) to "gaps", or take indices="int32"',
        )


#: by name
IndexCodec: TypeAlias = Int32 | Gaps
INDEX_CODECS: Mapping[str, IndexCodec] = MappingProxyType({"int32": Int32(), "gaps": Gaps()})


class Floats:
    """Encodes every value as a float of eight, four or two bytes, rounded to the nearest, ties to even.

    "float16" is IEEE half precision: 11 significant bits, up to 65504, steps of 6e-8 around 0. Values below
    3e-8 become 0 and stay in the residual: with gradients that small take "bfloat16", the upper half of
    float32: 8 significant bits, its full range. float64 becomes either by way of float32.
    """

    def __init__(self, code: int, dtype: type[np.generic], largest: float) -> None:
        self.code, self._dtype, self._largest = code, np.dtype(dtype), largest

    def num_words(self, count: int) -> int:
        """Returns how many words `count` values take; a larger count never takes fewer."""
        return -(-count * self._dtype.itemsize // 4)

    def encode(self, values: Values, words: Words) -> None:
        """Writes the values, rounded and limited to the format's largest number; NaN becomes 0."""
        wider = np.dtype(np.float64 if self._dtype == np.float64 else np.float32)
        if values.itemsize > self._dtype.itemsize:
            values = np.clip(values, -self._largest, self._largest)
            values[values != values] = 0
        words[-1:] = 0
        words.view(self._dtype)[: values.size] = narrow(values.astype(wider, copy=False), self._dtype)

    def decode(self, words: Words, out: Values) -> None:
        out[:] = widen(words.view(self._dtype)[: out.size])  # float64 may begin in the middle of eight bytes


#: the largest finite bfloat16
_LARGEST_BFLOAT16 = float(np.uint32(0x7F7F0000).view(np.float32))
_FLOATS = {
    "float32": Floats(1, np.float32, float(np.finfo(np.float32).max)),
    "float64": Floats(2, np.float64, math.inf),
    "float16": Floats(3, np.int16, 65504.0),
    "bfloat16": Floats(4, np.uint16, _LARGEST_BFLOAT16),
}


#: values that share two magnitudes
TWO_BIT_BLOCK = 64


class TwoBit:
    """Encodes values as a sign and one of two magnitudes, which 64 values share: 2.5 bits a value.

    ``small = mean |v| of those with |v| <= mean |v|,  large = mean |v| of the others``

    The block is split at its mean, so the code is closed: no search. What is selected has a hole around 0,
    and two magnitudes for each sign lose a few hundredths of its square. Rounding twice changes nothing. NaN
    counts as 0.

    Example:
        By hand: magnitudes 1, 2, 3 and 10 have the mean 4, so 2 stands for the first three.

        >>> words = np.zeros(TwoBit().num_words(4), np.uint32)
        >>> TwoBit().encode(np.array([1, -2, 3, -10], np.float32), words)
        >>> out = np.empty(4, np.float32)
        >>> TwoBit().decode(words, out)
        >>> out, [bin(word) for word in words[1:]]
        (array([  2.,  -2.,   2., -10.], dtype=float32), ['0b1010', '0b1000'])
    """

    code = 5

    def num_words(self, count: int) -> int:
        """Returns how many words `count` values take: one per block for its magnitudes, two bits a value."""
        return -(-count // TWO_BIT_BLOCK) + 2 * (-(-count // 32))

    def encode(self, values: Values, words: Words) -> None:
        blocks, planes = self._split(words, values.size)
        means = np.empty((blocks.size, 2), np.float32)
        kernels.encode_two_bits(np.ascontiguousarray(values), _LARGEST_BFLOAT16, means, planes)
        _FLOATS["bfloat16"].encode(means.reshape(-1), blocks)

    def decode(self, words: Words, out: Values) -> None:
        blocks, planes = self._split(words, out.size)
        kernels.decode_two_bits(blocks.view(np.uint16), planes, out)

    def _split(self, words: Words, count: int) -> tuple[Words, Words]:
        """Returns two views of an encoding: a word per block for two magnitudes, and the values' bits."""
        blocks = -(-count // TWO_BIT_BLOCK)
        return words[:blocks], words[blocks:].reshape(2, -1)


#: by name
ValueCodec: TypeAlias = Floats | TwoBit
VALUE_CODECS: Mapping[str, ValueCodec] = MappingProxyType({**_FLOATS, "2bit": TwoBit()})
