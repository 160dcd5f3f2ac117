"""Selection on a GPU: positions in ascending order, by counting, a running sum, and writing.

Both passes load_tile only into blocks whose maximum passes; the second mostly finds them in the cache.
An exact selection takes what is above a floor, and the first of those equal to it.

The k-th largest magnitude is that floor, found without reading anything back on the way:

1. Radix select over the block maxima, of their highest 24 bits only: a lower bound of the k-th largest
   maximum, and so of the k-th largest element.
2. What reaches the bound goes into a buffer, in any order: a little more than k elements.
3. Radix select over the buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.kernels.layout import Layout
from horovod_sparse.tensors.plain_kernels import int_type, num_magnitude_bits
from horovod_sparse.tensors.triton.blocks import (
    BINS,
    MAX_PROGRAMS,
    OPTIONS,
    Passing,
    RadixSelect,
    advance,
    digits,
    list_blocks,
    load_tile,
)

# Digits of the block maxima that are looked at: they only have to give a good lower bound.
_BOUND_DIGITS = 3
# A window of up to so many elements fits a buffer as it is.
_SMALL = 1 << 20


@triton.jit(do_not_specialize=["start", "stop", "capacity"])
def _gather_candidates_kernel(  # type: ignore[no-untyped-def]
    bits, blocks, facts, start, stop, buffer, capacity, count,
    FULL_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Collects the keys of [start, stop) that reach the bound, in any order, and counts them."""
    bound = tl.load(facts).to(bits.dtype.element_ty)
    total = tl.load(facts + 1).to(tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(total, ROWS), tl.num_programs(0)):
        _, key, inside = load_tile(bits, blocks, total, tile, start, stop, FULL_MASK, ROWS, BLOCK)
        hits = inside & (key >= bound)
        ones = hits.to(tl.int32)
        place = tl.atomic_add(count, tl.sum(ones, axis=0)) + tl.cumsum(ones, axis=0) - 1
        tl.store(buffer + place, key, mask=hits & (place < capacity))


@triton.jit(do_not_specialize=["k", "level", "width", "capacity"])
def _write_kth_kernel(  # type: ignore[no-untyped-def]
    counters, state, k, level, width, count, capacity, report, CANDIDATES: tl.constexpr, BINS: tl.constexpr
):
    """Writes the k-th key, and whether the buffer of candidates was too small."""
    prefix, _ = advance(counters, state, k, level, width, BINS)
    overflow = tl.zeros([], tl.int64)
    if CANDIDATES:
        found = tl.load(count)
        # Fewer than k are not 0: then the k-th is.
        prefix = tl.where(found < k, 0, prefix)
        overflow += (found > capacity).to(tl.int64)
    tl.store(report, prefix)
    tl.store(report + 1, overflow)


def find_kth(
    values: Tensor,
    maxima: Tensor,
    layout: Layout,
    k: int,
    start: int,
    stop: int,
    dense: bool,
    capacity: int | None = None,
) -> tuple[Tensor, Passing | None]:
    """Returns the k-th largest's magnitude bits, and the list of blocks that may contain the k largest."""
    block, device = layout.block, values.device
    kind, num_bits = int_type(values.dtype), num_magnitude_bits(values.dtype)
    bits = values.view(kind)
    all_digits = digits(num_bits)
    num_words = len(all_digits) + _BOUND_DIGITS
    counters = torch.zeros(num_words * BINS + 1, dtype=torch.int32, device=device)
    state = torch.empty(2 * num_words, dtype=torch.int64, device=device)
    report = torch.empty(2, dtype=torch.int64, device=device)
    count = counters[-1:]
    cut = _BOUND_DIGITS * BINS
    radix = RadixSelect(counters[cut:], state[2 * _BOUND_DIGITS :], k, num_bits)

    first, last = layout.whole_blocks(start, stop)
    # Without k whole blocks there is no bound: all that is not 0 would be a candidate.
    bounded = k <= last - first
    dense = dense or (not bounded and stop - start > _SMALL)
    room, passing = stop - start, None
    if dense:
        radix.count(bits[start:stop], len(all_digits))
    else:
        bound_radix = RadixSelect(counters, state, k, num_bits)
        if bounded:
            bound_radix.count(maxima[first:last], _BOUND_DIGITS)
            room = min(room, 2 * k + (1 << 16))
        room = room if capacity is None else capacity
        passing = list_blocks(maxima, block, start, stop, 1, bound_radix if bounded else None, _BOUND_DIGITS)
        buffer = torch.empty(room, dtype=kind, device=device)
        _gather_candidates_kernel[(min(passing.max_tiles, MAX_PROGRAMS),)](
            bits, passing.blocks, passing.facts, start, stop, buffer, room, count,
            FULL_MASK=torch.iinfo(kind).max, ROWS=passing.rows, BLOCK=block, **OPTIONS,
        )  # fmt: skip
        radix.count(buffer, len(all_digits), count)
    _write_kth_kernel[(1,)](
        radix.counters, radix.state, k, len(all_digits), all_digits[-1][1], count, room, report,
        CANDIDATES=not dense, BINS=BINS, **OPTIONS,
    )  # fmt: skip
    return report, passing


def kth(values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int, dense: bool) -> Tensor:
    return find_kth(values, maxima, layout, k, start, stop, dense)[0]


@triton.jit(do_not_specialize=["start", "stop", "max_tiles"])
def _count_selected_kernel(  # type: ignore[no-untyped-def]
    bits, blocks, facts, floor, start, stop, counts, max_tiles,
    EXACT: tl.constexpr, FULL_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts each tile's elements above the floor (upper half of a word) and equal to it (lower half)."""
    limit = tl.load(floor).to(bits.dtype.element_ty)
    total = tl.load(facts + 1).to(tl.int32)
    for tile in range(tl.program_id(0), max_tiles, tl.num_programs(0)):
        count = tl.zeros([], tl.int64)
        if tile * ROWS < total:
            _, key, inside = load_tile(bits, blocks, total, tile, start, stop, FULL_MASK, ROWS, BLOCK)
            if EXACT:
                count += tl.sum((inside & (key == limit)).to(tl.int32), axis=0)
                count += tl.sum((inside & (key > limit)).to(tl.int32), axis=0).to(tl.int64) << 32
            else:
                count += tl.sum((inside & (key >= limit)).to(tl.int32), axis=0).to(tl.int64) << 32
        tl.store(counts + tile, count)


@triton.jit(do_not_specialize=["start", "stop", "max_tiles", "k"])
def _write_selected_kernel(  # type: ignore[no-untyped-def]
    bits, blocks, facts, floor, start, stop, sums, max_tiles, k, out,
    EXACT: tl.constexpr, FULL_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes each tile's selected indices behind those of earlier tiles, k at most."""
    limit = tl.load(floor).to(bits.dtype.element_ty)
    number = tl.load(facts + 1).to(tl.int32)
    total = tl.load(sums + max_tiles - 1)
    if tl.program_id(0) == 0:
        tl.store(out, (total >> 32).to(tl.int32))
    for tile in range(tl.program_id(0), tl.cdiv(number, ROWS), tl.num_programs(0)):
        before = tl.load(sums + tile - 1, mask=tile > 0, other=0)
        if tl.load(sums + tile) != before:
            where, key, inside = load_tile(bits, blocks, number, tile, start, stop, FULL_MASK, ROWS, BLOCK)
            place = before >> 32
            if EXACT:
                # Ties: as many as are missing to k, the first ones.
                ties = k - (total >> 32)
                earlier = before & 0xFFFFFFFF
                equal = inside & (key == limit)
                rank = (earlier + tl.cumsum(equal.to(tl.int32), axis=0)).to(tl.int32)
                chosen = (inside & (key > limit)) | (equal & (rank <= ties))
                place += tl.minimum(earlier, ties)
            else:
                chosen = inside & (key >= limit)
            slot = place.to(tl.int32) + tl.cumsum(chosen.to(tl.int32), axis=0)
            tl.store(out + slot, where, mask=chosen & (slot <= k))


def _select(
    values: Tensor,
    layout: Layout,
    passing: Passing,
    floor: Tensor,
    exact: bool,
    start: int,
    stop: int,
    k: int,
) -> Tensor:
    """Returns the count, then the indices, of elements that reach `floor`; with `exact` of the k largest."""
    tiles, bits, device = passing.max_tiles, values.view(int_type(values.dtype)), values.device
    counts = torch.empty(tiles, dtype=torch.int64, device=device)
    out = torch.empty(k + 1, dtype=torch.int32, device=device)
    full_mask = torch.iinfo(bits.dtype).max
    shape = {"EXACT": exact, "FULL_MASK": full_mask, "ROWS": passing.rows, "BLOCK": layout.block, **OPTIONS}
    given, grid = (bits, passing.blocks, passing.facts, floor, start, stop), (min(tiles, MAX_PROGRAMS),)
    _count_selected_kernel[grid](*given, counts, tiles, **shape)
    _write_selected_kernel[grid](*given, counts.cumsum(0), tiles, k, out, **shape)
    return out


def at_least(
    values: Tensor, maxima: Tensor, layout: Layout, bits: int, start: int, stop: int, capacity: int
) -> tuple[Tensor, Tensor]:
    passing = list_blocks(maxima, layout.block, start, stop, bits)
    # The bound of the list is the threshold.
    out = _select(values, layout, passing, passing.facts, False, start, stop, capacity)
    return out[:1], out[1:]


def largest(
    values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int, dense: bool
) -> tuple[Tensor, Tensor]:
    report, passing = find_kth(values, maxima, layout, k, start, stop, dense)
    if passing is None:
        passing = list_blocks(maxima, layout.block, start, stop, 0)
    out = _select(values, layout, passing, report, True, start, stop, k)
    return report, out[1:]
