"""Radix select on a GPU, and the list of blocks whose maximum passes, in ascending order.

Radix select takes eight bits per launch, nothing read back in between: a launch leaves 256 counters in
memory, and the next one (every program for itself) finds the bin of the k-th in them, so that neither the
host nor a launch of its own is needed between digits.

Few blocks pass, so the passes that open blocks go through their list: every program then has work, and the
work is the same for all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements per program of most kernels, and its warps.
TILE = 4096
WARPS = 8
# Of every launch. Contraction to fused multiply-add would round differently from the host.
OPTIONS: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}


def num_programs(num_elements: int, tile: int = TILE) -> int:
    """Returns how many programs (instances of a kernel) cover n elements; at least 1."""
    return max(triton.cdiv(num_elements, tile), 1)


@triton.jit
def magnitude(values):  # type: ignore[no-untyped-def]
    """Returns the bits without the sign: int64 for float64, else int32."""
    if values.dtype == tl.float64:
        bits = values.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def is_finite(values):  # type: ignore[no-untyped-def]
    """Returns a mask of the finite values, by their bits, since a maximum of floats may drop NaN."""
    if values.dtype == tl.float64:
        finite = magnitude(values) < 0x7FF0000000000000
    else:
        finite = magnitude(values) < 0x7F800000
    return finite


@triton.jit
def root(values):  # type: ignore[no-untyped-def]
    """Returns correctly rounded square roots, which Triton's own of float32 are not."""
    return tl.sqrt(values) if values.dtype == tl.float64 else tl.sqrt_rn(values)


@triton.jit
def quotient(left, right):  # type: ignore[no-untyped-def]
    """Returns correctly rounded quotients, which Triton's own of float32 are not."""
    return left / right if left.dtype == tl.float64 else tl.div_rn(left, right)


BINS = 256
# Programs of a launch, at most: each ends with up to 256 atomic additions.
_MAX_PROGRAMS = 528
_KEYS = 2048


def digits(num_bits: int) -> list[tuple[int, int]]:
    """Returns shift and width of each digit of a radix select, from the top; the last has the rest."""
    return [(low, high - low) for high, low in itertools.pairwise([*range(num_bits, 0, -8), 0])]


@triton.jit
def advance(counters, state, k, level, width, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the k-th key's first digits (before `level`), and its rank among the keys that share them."""
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
def _count_digit_kernel(  # type: ignore[no-untyped-def]
    keys, size, size_pointer, counters, state, k, level, shift, width,
    SIZE_ON_DEVICE: tl.constexpr, FULL_MASK: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Counts, for each value of digit `level`, the keys whose higher digits are the k-th key's."""
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


class RadixSelect:
    """Finds the k-th largest key on a device, digit by digit."""

    def __init__(self, counters: Tensor, state: Tensor, k: int, num_bits: int) -> None:
        self.counters, self.state, self.k = counters, state, k
        self.digits = digits(num_bits)
        self._full_mask = (1 << num_bits) - 1

    def count(self, keys: Tensor, num_digits: int, size_on_device: Tensor | None = None) -> None:
        """Counts the first `num_digits` digits of the keys, one after another."""
        grid = min(num_programs(keys.numel(), _KEYS), _MAX_PROGRAMS)
        pointer = self.counters if size_on_device is None else size_on_device
        for level, (shift, width) in enumerate(self.digits[:num_digits]):
            _count_digit_kernel[(grid,)](
                keys, keys.numel(), pointer, self.counters, self.state, self.k, level, shift, width,
                SIZE_ON_DEVICE=size_on_device is not None, FULL_MASK=self._full_mask, CHUNK=_KEYS, BINS=BINS,
                **OPTIONS,
            )  # fmt: skip


# Maxima per program.
_CHUNK = 4096
# Numbers of passing blocks that a program adds up at a time, to know where it writes.
_STRIDE = 512
# Programs of a pass over the list, whose length the host does not know: each goes on to further tiles.
MAX_PROGRAMS = 2112


@dataclass(frozen=True)
class Passing:
    """The list of a window's blocks whose maximum reaches a bound."""

    blocks: Tensor
    facts: Tensor
    rows: int

    @property
    def max_tiles(self) -> int:
        """An upper bound of the tiles to open: the host does not know how many blocks are in the list."""
        return num_programs(self.blocks.numel(), self.rows)


@triton.jit(do_not_specialize=["bound", "first", "last", "k", "bound_shift"])
def _count_blocks_kernel(  # type: ignore[no-untyped-def]
    maxima, first, last, bound, counters, state, k, bound_shift, facts, counts,
    BOUND_DIGITS: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Computes the bound, and counts each chunk's blocks that reach it."""
    limit = tl.zeros([], tl.int64) + bound
    if BOUND_DIGITS > 0:
        prefix, _ = advance(counters, state, k, BOUND_DIGITS, 8, BINS)
        limit = tl.maximum(prefix << bound_shift, 1)
    program = tl.program_id(0)
    if program == 0:
        tl.store(facts, limit)
    blocks = first + program * CHUNK + tl.arange(0, CHUNK)
    exists = blocks < last
    tops = tl.load(maxima + blocks, mask=exists, other=0)
    passes = exists & (tops >= limit.to(tops.dtype))
    tl.store(counts + program, tl.sum(passes.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["first", "last"])
def _write_blocks_kernel(  # type: ignore[no-untyped-def]
    maxima, first, last, facts, counts, out, CHUNK: tl.constexpr, STRIDE: tl.constexpr
):
    """Writes the numbers of the blocks that reach the bound, ascending."""
    program = tl.program_id(0)
    lanes = tl.arange(0, STRIDE)
    sums = tl.zeros([STRIDE], tl.int32)
    for start in range(0, program, STRIDE):
        sums += tl.load(counts + start + lanes, mask=start + lanes < program, other=0)
    before = tl.sum(sums, axis=0)
    blocks = first + program * CHUNK + tl.arange(0, CHUNK)
    exists = blocks < last
    tops = tl.load(maxima + blocks, mask=exists, other=0)
    passes = exists & (tops >= tl.load(facts).to(tops.dtype))
    slot = before + tl.cumsum(passes.to(tl.int32), axis=0) - 1
    tl.store(out + slot, blocks, mask=passes)
    if program == tl.num_programs(0) - 1:
        tl.store(facts + 1, (before + tl.load(counts + program)).to(tl.int64))


def list_blocks(
    maxima: Tensor,
    block: int,
    start: int,
    stop: int,
    bound: int,
    radix: RadixSelect | None = None,
    bound_digits: int = 0,
) -> Passing:
    """Returns the list of blocks that overlap [start, stop) and whose maximum is >= the bound."""
    first, last = start // block, -(-stop // block)
    device = maxima.device
    facts = torch.empty(2, dtype=torch.int64, device=device)
    blocks = torch.empty(last - first, dtype=torch.int32, device=device)
    chunks = num_programs(last - first, _CHUNK)
    counts = torch.empty(chunks, dtype=torch.int32, device=device)
    counters, state, k, shift = (counts, facts, 0, 0)
    if radix is not None:
        counters, state, k, shift = radix.counters, radix.state, radix.k, radix.digits[bound_digits - 1][0]
    _count_blocks_kernel[(chunks,)](
        maxima, first, last, bound, counters, state, k, shift, facts, counts,
        BOUND_DIGITS=bound_digits if radix is not None else 0, CHUNK=_CHUNK, BINS=BINS, **OPTIONS,
    )  # fmt: skip
    _write_blocks_kernel[(chunks,)](
        maxima, first, last, facts, counts, blocks, CHUNK=_CHUNK, STRIDE=_STRIDE, **OPTIONS
    )
    return Passing(blocks, facts, TILE // block)


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    values, blocks, total, tile, start, stop, FULL_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Loads a tile of listed blocks: returns indices, magnitude bits, and a mask of the window.

    Positions are 32 bits wide: beyond n they may wrap to negative ones, which no window holds.
    """
    rows = tile * ROWS + tl.arange(0, ROWS)
    listed = rows < total
    block = tl.load(blocks + rows, mask=listed, other=0)
    where = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = listed[:, None] & (where >= start) & (where < stop)
    key = tl.load(values + where, mask=inside, other=0) & FULL_MASK
    return (
        tl.reshape(where, [ROWS * BLOCK]),
        tl.reshape(key, [ROWS * BLOCK]),
        tl.reshape(inside, [ROWS * BLOCK]),
    )
