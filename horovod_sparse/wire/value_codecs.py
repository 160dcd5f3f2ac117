"""Ways to write values: 64, 32, 16 or 8 bits each. What is lost is known to the sender at once.

A value that was written is always finite: what is beyond the largest number saturates, NaN becomes 0.
The sender keeps the difference in its residual (`WireFormat.round`), so nothing is lost for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays.protocol import Values
from horovod_sparse.kernels import host_codecs_values as kernels

Words: TypeAlias = NDArray[np.uint32]


class ValueCodec(Protocol):
    """Values of one selection into 32-bit words, and back."""

    code: ClassVar[int]

    def num_words(self, count: int) -> int:
        """Length of `count` values; never falls when count grows."""

    def encode(self, values: Values, words: Words) -> None:
        """Float32 or float64 into `words`, which has the length that `num_words` says."""

    def decode(self, words: Words, out: Values) -> None:
        """Fills `out`, float32 or float64, as long as the count."""


class Float32:
    """Four bytes each: exact for float32, rounded for float64."""

    code: ClassVar[int] = 1

    def num_words(self, count: int) -> int:
        """One word per value."""
        return count

    def encode(self, values: Values, words: Words) -> None:
        """A copy of float32, as it is; float64 is rounded, at most to the largest float32."""
        if values.dtype == np.float64:
            largest = float(np.finfo(np.float32).max)
            values = np.nan_to_num(np.clip(values, -largest, largest))
        words.view(np.float32)[:] = values

    def decode(self, words: Words, out: Values) -> None:
        """See `ValueCodec.decode`."""
        out[:] = words.view(np.float32)


class Float64:
    """Eight bytes each: exact."""

    code: ClassVar[int] = 2

    def num_words(self, count: int) -> int:
        """Two words per value."""
        return 2 * count

    def encode(self, values: Values, words: Words) -> None:
        """A copy."""
        words[:] = np.ascontiguousarray(values, np.float64).view(np.uint32)

    def decode(self, words: Words, out: Values) -> None:
        """See `ValueCodec.decode`."""
        out[:] = words.view(np.float64)  # may begin in the middle of eight bytes; NumPy copies that


class Float16:
    """IEEE half precision, two bytes each: 11 significant bits, up to 65504, steps of 6e-8 around 0.

    Values below 3e-8 become 0 and stay in the residual: with gradients that small take bfloat16.
    """

    code: ClassVar[int] = 3

    def num_words(self, count: int) -> int:
        """Half a word per value."""
        return (count + 1) // 2

    def encode(self, values: Values, words: Words) -> None:
        """To the nearest, ties to even; float64 by way of float32."""
        words[-1:] = 0
        kernels.encode_float16(values, words.view(np.int16))

    def decode(self, words: Words, out: Values) -> None:
        """See `ValueCodec.decode`."""
        kernels.decode_half(words.view(np.int16), out)


class BFloat16:
    """The upper half of float32, two bytes each: 8 significant bits, the full range of float32."""

    code: ClassVar[int] = 4

    def num_words(self, count: int) -> int:
        """Half a word per value."""
        return (count + 1) // 2

    def encode(self, values: Values, words: Words) -> None:
        """To the nearest, ties to even; float64 by way of float32."""
        words[-1:] = 0
        kernels.encode_bfloat16(values, words.view(np.uint16))

    def decode(self, words: Words, out: Values) -> None:
        """See `ValueCodec.decode`."""
        kernels.decode_half(words.view(np.uint16), out)


class Int8:
    """One byte each, and one float32 scale per 64 values.

    ``scale = max |value| / 127,  code = round(value / scale)`` (ties to even)

    Scales are rounded up to 17 significant bits, so that code * scale is exact in float32: every rank
    decodes the same, and rounding twice changes nothing. A block of zeros has scale 0; so has one whose
    scale would be subnormal (below 1.2e-38), which then stays in the residual.

    Example:
        By hand: the largest is 127 * 0.5, so the scale is 0.5, and 3.2 = 6.4 * 0.5 becomes 6 * 0.5.

        >>> words = np.zeros(Int8().num_words(2), np.uint32)
        >>> Int8().encode(np.array([-63.5, 3.2], np.float32), words)
        >>> words[:1].view(np.float32), words[1:].view(np.int8)[:2]
        (array([0.5], dtype=float32), array([-127,    6], dtype=int8))
    """

    code: ClassVar[int] = 5

    def num_words(self, count: int) -> int:
        """A word per block, a quarter of a word per value."""
        return -(-count // kernels.INT8_BLOCK) + (count + 3) // 4

    def encode(self, values: Values, words: Words) -> None:
        """Scales, then codes."""
        words[-1:] = 0
        blocks = -(-values.size // kernels.INT8_BLOCK)
        scales = words[:blocks]
        kernels.encode_int8(values, scales, scales.view(np.float32), words[blocks:].view(np.int8))

    def decode(self, words: Words, out: Values) -> None:
        """See `ValueCodec.decode`."""
        blocks = -(-out.size // kernels.INT8_BLOCK)
        kernels.decode_int8(words[blocks:].view(np.int8), words[:blocks].view(np.float32), out)


#: The ways by name.
VALUE_CODECS: Mapping[str, ValueCodec] = MappingProxyType(
    {
        "float32": Float32(),
        "float64": Float64(),
        "float16": Float16(),
        "bfloat16": BFloat16(),
        "int8": Int8(),
    }
)
