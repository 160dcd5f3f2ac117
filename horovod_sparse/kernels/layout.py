"""Layout of an accumulator: its division into blocks, and the integers that hold its magnitudes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from horovod_sparse.errors import ArgumentError


def block_size(density: float) -> int:
    return 64 if density <= 0.01 else 256


@dataclass(frozen=True)
class Layout:
    """Divides an accumulator into contiguous blocks of equal length; the last may be shorter."""

    num_elements: int
    block: int = 64
    #: how many blocks there are
    num_blocks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.num_elements < 2**31:
            raise ArgumentError("num_elements", self.num_elements, "fewer than 2**31 elements per bucket")
        if self.block <= 0 or self.block % 32:
            raise ArgumentError("block", self.block, "a multiple of 32")
        object.__setattr__(self, "num_blocks", -(-self.num_elements // self.block))

    def whole_blocks(self, start: int, stop: int) -> tuple[int, int]:
        """Returns the range [first, last) of blocks that lie completely within a window."""
        first = -(-start // self.block)
        last = self.num_blocks if stop >= self.num_elements else stop // self.block
        return first, max(first, last)


def bits_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns the unsigned dtype that holds the bits of a float32 or float64."""
    return np.dtype(np.uint64 if np.dtype(dtype) == np.float64 else np.uint32)


def bits_of(threshold: float, dtype: Any) -> Any:
    """Returns the bits of the smallest number of a dtype that is >= threshold and above 0."""
    if threshold != threshold:
        raise ArgumentError("threshold", threshold, "a threshold that is a number, not NaN")
    dtype = np.dtype(dtype)
    with np.errstate(over="ignore"):
        nearest = dtype.type(max(threshold, 0.0))
    if float(nearest) < threshold:
        nearest = np.nextafter(nearest, dtype.type(np.inf))
    bits = bits_dtype(dtype)
    return max(nearest.view(bits.type), bits.type(1))


def float_of(bits: Any, dtype: Any) -> float:
    return float(bits_dtype(dtype).type(bits).view(np.dtype(dtype).type))
