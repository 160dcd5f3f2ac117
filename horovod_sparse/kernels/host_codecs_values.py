"""float32 and float64 values into 16 or 8 bits, and back; always finite, always to the nearest.

Integer arithmetic on the bits of float32, without branches, so that LLVM makes vectors of it: NumPy's
own conversion to float16 takes 4 ns per element, and 59 where the result is subnormal; this one 0.15.
"""

from __future__ import annotations

import numpy as np

from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.scalars import raw_bits, read

__all__ = [
    "INT8_BLOCK",
    "decode_half",
    "decode_int8",
    "encode_bfloat16",
    "encode_float16",
    "encode_int8",
]

#: Values that share a scale.
INT8_BLOCK = 64

_SIZE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_HALF_SIGN = np.uint32(0x8000)
_ONE, _THIRTEEN, _SIXTEEN = np.uint32(1), np.uint32(13), np.uint32(16)

_LARGEST_FLOAT16 = np.uint32(0x477FE000)  # 65504 as float32
_NORMAL_FLOAT16 = np.uint32(0x38800000)  # 2**-14, the smallest normal one
_REBIAS = np.uint32((127 - 15) << 10)
_HALF_OF_FLOAT16_STEP = np.uint32(0x0FFF)
_HALF = np.float32(0.5)
_BITS_OF_HALF = np.uint32(0x3F000000)

_LARGEST_BFLOAT16 = np.uint32(0x7F7F0000)
_HALF_OF_BFLOAT16_STEP = np.uint32(0x7FFF)

# Adding and taking off again rounds a float64 to the nearest integer, ties to even.
_TO_INTEGER = 1.5 * 2.0**52
# A scale has 17 significant bits: 127 times it is then exact in float32, and so is every decoded value.
_UNUSED_BITS = 0x7F
_LARGEST_SCALE = int((np.finfo(np.float32).max / np.float32(127)).view(np.uint32)) & ~_UNUSED_BITS
_SMALLEST_SCALE = 0x00800000  # 2**-126; below it, some processors are set to take 0


@kernel
def encode_float16(values, out):  # type: ignore[no-untyped-def]
    """Nearest float16, ties to even, at most 65504 in magnitude; NaN becomes 0. Bits into int16."""
    for i in range(values.size):
        number = np.float32(values[i])
        bits = raw_bits(number)
        size = bits & _SIZE
        small = min(size, _LARGEST_FLOAT16)
        odd = (small >> _THIRTEEN) & _ONE
        normal = ((small + _HALF_OF_FLOAT16_STEP + odd) >> _THIRTEEN) - _REBIAS
        # From 0.5 to 1 a float32 has steps of 2**-24, which is the smallest float16.
        subnormal = raw_bits(np.float32(abs(number) + _HALF)) - _BITS_OF_HALF
        rounded = subnormal if size < _NORMAL_FLOAT16 else normal
        rounded = np.uint32(0) if size > _INFINITY else rounded
        out[i] = np.int16(np.uint16(rounded | ((bits >> _SIXTEEN) & _HALF_SIGN)))


@kernel
def encode_bfloat16(values, out):  # type: ignore[no-untyped-def]
    """Nearest bfloat16, ties to even, at most the largest finite one; NaN becomes 0. Bits into uint16."""
    for i in range(values.size):
        bits = raw_bits(np.float32(values[i]))
        size = bits & _SIZE
        small = min(size, _LARGEST_BFLOAT16)
        rounded = (small + _HALF_OF_BFLOAT16_STEP + ((small >> _SIXTEEN) & _ONE)) >> _SIXTEEN
        rounded = np.uint32(0) if size > _INFINITY else rounded
        out[i] = np.uint16(rounded | ((bits >> _SIXTEEN) & _HALF_SIGN))


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

    Args:
        values: float32 or float64 [count].
        scale_bits: uint32 [blocks], overwritten.
        scales: the same memory as float32.
        codes: int8, at least [count], overwritten.
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
