"""Radix select on a GPU, eight bits per launch, nothing read back in between.

A launch leaves 256 counters in memory; the next one (every program for itself) finds the bin of the
k-th in them, so that neither the host nor a launch of its own is needed between digits.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.device.triton.bits import OPTIONS, programs

__all__ = ["BINS", "Radix", "advance", "digits"]

BINS = 256
# Programs of a launch, at most: each ends with up to 256 atomic additions.
_MAX_PROGRAMS = 528
_CHUNK = 2048


def digits(num_bits: int) -> list[tuple[int, int]]:
    """Shift and width of the digits, from the top; the last has what is left.

    Example:
        >>> digits(31)
        [(23, 8), (15, 8), (7, 8), (0, 7)]
    """
    return [(low, high - low) for high, low in itertools.pairwise([*range(num_bits, 0, -8), 0])]


@triton.jit
def advance(counters, state, k, level, width, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefix and rank before digit `level`; width: of the digit before, whose counters say it."""
    prefix = tl.zeros([], tl.int64)
    left = prefix + k
    if level > 0:
        bins = tl.arange(0, BINS)
        counts = tl.load(counters + (level - 1) * BINS + bins)
        if level > 1:
            prefix = tl.load(state + (level - 1) * 2)
            left = tl.load(state + (level - 1) * 2 + 1)
        at_or_above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        # Counts only fall from bin to bin; with fewer than k keys no bin holds the k-th, any will do.
        chosen = tl.maximum(tl.sum((at_or_above >= left).to(tl.int32), axis=0) - 1, 0)
        left -= tl.sum(tl.where(bins > chosen, counts, 0), axis=0)
        prefix = (prefix << width) + chosen
    return prefix, left


@triton.jit(do_not_specialize=["size", "k", "level", "shift", "width"])
def _count_kernel(  # type: ignore[no-untyped-def]
    keys, size, size_pointer, counters, state, k, level, shift, width,
    SIZE_ON_DEVICE: tl.constexpr, FULL_MASK: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Counts digit `level` of the keys that have the digits found so far."""
    # The digits before this one have all 8 bits, only the last may be shorter.
    prefix, left = advance(counters, state, k, level, 8, BINS)
    if tl.program_id(0) == 0:
        tl.store(state + level * 2, prefix)
        tl.store(state + level * 2 + 1, left)
    stop = tl.cast(size, tl.int64)
    if SIZE_ON_DEVICE:
        stop = tl.minimum(stop, tl.load(size_pointer))
    # 64 bits: the last step of the loop may pass 2**31.
    lanes = tl.arange(0, CHUNK).to(tl.int64)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(tl.program_id(0) * CHUNK, stop, tl.num_programs(0) * CHUNK):
        where = start + lanes
        inside = where < stop
        key = tl.load(keys + where, mask=inside, other=0) & FULL_MASK
        counted = inside & ((key >> (shift + width)) == prefix.to(key.dtype))
        digit = tl.where(counted, (key >> shift) & ((1 << width) - 1), 0).to(tl.int32)
        # What does not count falls into bin 0, and is taken off there.
        counts += tl.histogram(digit, BINS)
        others = CHUNK - tl.sum(counted.to(tl.int32), axis=0)
        counts -= tl.where(bins == 0, others, 0)
    tl.atomic_add(counters + level * BINS + bins, counts, mask=counts > 0)


class Radix:
    """Counters and state of one radix select.

    Args:
        counters: int32, zeros, `BINS` per digit.
        state: int64, two words per digit.
        k: rank from 1.
        num_bits: of the keys, which are below 2**num_bits once the sign is off.
    """

    def __init__(self, counters: Tensor, state: Tensor, k: int, num_bits: int) -> None:
        self.counters, self.state, self.k = counters, state, k
        self.digits = digits(num_bits)
        self._full_mask = (1 << num_bits) - 1

    def count(self, keys: Tensor, num_digits: int, size_on_device: Tensor | None = None) -> None:
        """Counts the first digits of the keys, one after the other.

        Args:
            keys: int32 or int64, the sign is ignored.
            num_digits: how many.
            size_on_device: int32, shape (1,): only that many keys count.
        """
        grid = min(programs(keys.numel(), _CHUNK), _MAX_PROGRAMS)
        pointer = self.counters if size_on_device is None else size_on_device
        for level, (shift, width) in enumerate(self.digits[:num_digits]):
            _count_kernel[(grid,)](
                keys, keys.numel(), pointer, self.counters, self.state, self.k, level, shift, width,
                SIZE_ON_DEVICE=size_on_device is not None, FULL_MASK=self._full_mask, CHUNK=_CHUNK, BINS=BINS,
                **OPTIONS,
            )  # fmt: skip
