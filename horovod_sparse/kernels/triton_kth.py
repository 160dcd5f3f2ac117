"""The k-th largest magnitude on a GPU: a radix select, eight bits per launch, nothing read back in between.

1. Radix select over the block maxima, of their highest 24 bits only: a lower bound of the k-th largest
   maximum, and so of the k-th largest element.
2. What reaches the bound goes into a buffer, in any order: a little more than k elements.
3. Radix select over the buffer.

A launch leaves its 256 counters in memory; the next one (every program for itself) finds the bin of
the k-th in them, so that neither the host nor a launch of its own is needed between digits.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.kernels.layout import Layout
from horovod_sparse.kernels.torch_bits import int_type, num_magnitude_bits
from horovod_sparse.kernels.triton_bits import TILE, WARPS, programs

__all__ = ["kth"]

_BINS = 256
# Digits of the block maxima that are looked at: they only have to give a good lower bound.
_BOUND_DIGITS = 3
# Programs of a launch that counts, at most: each ends with up to 256 atomic additions.
_MAX_PROGRAMS = 528
_CHUNK = 2048
# Words of a state: prefix (the digits found), rank that is left within it.
_STATE = 2


@triton.jit
def _advance(counters, state, k, level, mask, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefix and rank before digit `level`; mask: of the digit before, whose counters say it."""
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
        prefix = prefix * (mask + 1) + chosen
    return prefix, left


@triton.jit(do_not_specialize=["size", "k", "level", "shift", "width"])
def _count_kernel(  # type: ignore[no-untyped-def]
    keys, size, size_pointer, counters, state, k, level, shift, width,
    SIZE_ON_DEVICE: tl.constexpr, FULL_MASK: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Counts digit `level` of the keys that have the digits found so far."""
    # The digits before this one have all 8 bits, only the last may be shorter.
    prefix, left = _advance(counters, state, k, level, BINS - 1, BINS)
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


@triton.jit(do_not_specialize=["k", "start", "stop", "capacity", "bound_shift"])
def _gather_kernel(  # type: ignore[no-untyped-def]
    bits, maxima, counters, state, k, start, stop, buffer, capacity, count, bound_shift,
    BOUND_DIGITS: tl.constexpr, FULL_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """Keys of [start, stop) that reach the bound, in any order; `count` says how many there were."""
    bound = tl.zeros([], tl.int64)
    if BOUND_DIGITS > 0:
        prefix, _ = _advance(counters, state, k, BOUND_DIGITS, BINS - 1, BINS)
        bound = prefix << bound_shift
    bound = tl.maximum(bound, 1).to(bits.dtype.element_ty)
    blocks = (start // BLOCK).to(tl.int64) + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = blocks * BLOCK < stop
    passes = exists & (tl.load(maxima + blocks, mask=exists, other=0) >= bound)
    if tl.max(passes.to(tl.int32), axis=0) > 0:
        where = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = passes[:, None] & (where >= start) & (where < stop)
        key = tl.load(bits + where, mask=inside, other=0) & FULL_MASK
        key = tl.reshape(key, [ROWS * BLOCK])
        hits = key >= bound
        ones = hits.to(tl.int32)
        number = tl.sum(ones, axis=0)
        if number > 0:
            place = tl.atomic_add(count, number).to(tl.int64) + tl.cumsum(ones, axis=0) - 1
            tl.store(buffer + place, key, mask=hits & (place < capacity))


@triton.jit(do_not_specialize=["k", "level", "mask", "capacity"])
def _finish_kernel(  # type: ignore[no-untyped-def]
    counters, state, k, level, mask, count, capacity, report, CANDIDATES: tl.constexpr, BINS: tl.constexpr
):
    """One program: the key, and whether the buffer was too small."""
    prefix, _ = _advance(counters, state, k, level, mask, BINS)
    overflow = tl.zeros([], tl.int64)
    if CANDIDATES:
        found = tl.load(count)
        # Fewer than k are not 0: then the k-th is.
        prefix = tl.where(found < k, 0, prefix)
        overflow += (found > capacity).to(tl.int64)
    tl.store(report, prefix)
    tl.store(report + 1, overflow)


def _digits(num_bits: int) -> list[tuple[int, int]]:
    """Shift and width of the digits, from the top; the last has what is left."""
    cuts = [*range(num_bits, 0, -8), 0]
    return [(low, high - low) for high, low in itertools.pairwise(cuts)]


def kth(
    values: Tensor,
    maxima: Tensor,
    layout: Layout,
    k: int,
    start: int,
    stop: int,
    dense: bool,
    capacity: int | None = None,
) -> Tensor:
    """See `torch_plain.kth`; `capacity` is the room for candidates."""
    size, block, device = stop - start, layout.block, values.device
    kind = int_type(values.dtype)
    num_bits, full_mask = num_magnitude_bits(values.dtype), torch.iinfo(kind).max
    digits = _digits(num_bits)
    bits = values.view(kind)
    first, last = layout.whole_blocks(start, stop)
    # Without k whole blocks there is no bound: all that is not 0 would be a candidate.
    bounded = k <= last - first
    if not bounded and size > 1 << 20:
        dense = True
    room = min(size, 2 * k + (1 << 16)) if bounded else size
    room = room if capacity is None else capacity

    levels = len(digits)
    counters = torch.zeros((levels + _BOUND_DIGITS) * _BINS + 1, dtype=torch.int32, device=device)
    state = torch.empty((levels + _BOUND_DIGITS, _STATE), dtype=torch.int64, device=device)
    report = torch.empty(2, dtype=torch.int64, device=device)
    count = counters[-1:]

    def radix(keys: Tensor, length: int, to_do: list[tuple[int, int]], at: int, on_device: bool) -> None:
        grid = min(programs(length, _CHUNK), _MAX_PROGRAMS)
        for level, (shift, width) in enumerate(to_do):
            _count_kernel[(grid,)](
                keys, length, count, counters[at * _BINS :], state[at:], k, level, shift, width,
                SIZE_ON_DEVICE=on_device, FULL_MASK=full_mask, CHUNK=_CHUNK, BINS=_BINS, num_warps=WARPS,
            )  # fmt: skip

    if dense:
        radix(bits[start:stop], size, digits, _BOUND_DIGITS, False)
    else:
        if bounded:
            radix(maxima[first:last], last - first, digits[:_BOUND_DIGITS], 0, False)
        buffer = torch.empty(room, dtype=kind, device=device)
        num_blocks = -(-stop // block) - start // block
        rows = TILE // block
        _gather_kernel[(programs(num_blocks, rows),)](
            bits, maxima, counters, state, k, start, stop, buffer, room, count, digits[_BOUND_DIGITS - 1][0],
            BOUND_DIGITS=_BOUND_DIGITS if bounded else 0, FULL_MASK=full_mask, ROWS=rows, BLOCK=block,
            BINS=_BINS, num_warps=WARPS,
        )  # fmt: skip
        radix(buffer, room, digits, _BOUND_DIGITS, True)
    _finish_kernel[(1,)](
        counters[_BOUND_DIGITS * _BINS :], state[_BOUND_DIGITS:], k, levels, (1 << digits[-1][1]) - 1,
        count, room, report, CANDIDATES=not dense, BINS=_BINS, num_warps=4,
    )  # fmt: skip
    return report
