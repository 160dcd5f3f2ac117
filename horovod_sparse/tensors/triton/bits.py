"""Small functions that every Triton kernel inlines, and how wide its tiles are."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Elements per program of most kernels, and its warps.
TILE = 4096
WARPS = 8
# Of every launch. Contraction to fused multiply-add would round differently from the host.
OPTIONS: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}


def programs(num_elements: int, tile: int = TILE) -> int:
    """How many programs cover n elements; never none."""
    return max(triton.cdiv(num_elements, tile), 1)


@triton.jit
def magnitude(values):  # type: ignore[no-untyped-def]
    """The bits without the sign: int64 for float64, else int32."""
    if values.dtype == tl.float64:
        bits = values.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def is_finite(values):  # type: ignore[no-untyped-def]
    """False for Inf and NaN: decided by the bits, since a maximum of floats may drop NaN."""
    if values.dtype == tl.float64:
        finite = magnitude(values) < 0x7FF0000000000000
    else:
        finite = magnitude(values) < 0x7F800000
    return finite
