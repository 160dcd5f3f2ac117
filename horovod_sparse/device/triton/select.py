"""Selection on a GPU: positions in ascending order, by counting, a running sum, and writing.

Both passes look only into blocks whose maximum passes; the second mostly finds them in the cache.
An exact selection takes what is above a floor, and the first of those equal to it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.device.bits import int_type
from horovod_sparse.device.triton.bits import OPTIONS
from horovod_sparse.device.triton.blocks import MAX_PROGRAMS, Passing, list_blocks, look
from horovod_sparse.device.triton.kth import find_kth
from horovod_sparse.kernels.layout import Layout

__all__ = ["at_least", "count_tiles", "largest"]


@triton.jit(do_not_specialize=["start", "stop", "num_tiles"])
def _count_kernel(  # type: ignore[no-untyped-def]
    bits, blocks, facts, floor, start, stop, counts, num_tiles,
    EXACT: tl.constexpr, FULL_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per tile: how many are above the floor, in the upper half of the word; equal to it, in the lower."""
    limit = tl.load(floor).to(bits.dtype.element_ty)
    total = tl.load(facts + 1).to(tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        count = tl.zeros([], tl.int64)
        if tile * ROWS < total:
            _, key, inside = look(bits, blocks, total, tile, start, stop, FULL_MASK, ROWS, BLOCK)
            if EXACT:
                count += tl.sum((inside & (key == limit)).to(tl.int32), axis=0)
                count += tl.sum((inside & (key > limit)).to(tl.int32), axis=0).to(tl.int64) << 32
            else:
                count += tl.sum((inside & (key >= limit)).to(tl.int32), axis=0).to(tl.int64) << 32
        tl.store(counts + tile, count)


@triton.jit(do_not_specialize=["start", "stop", "num_tiles", "k"])
def _write_kernel(  # type: ignore[no-untyped-def]
    bits, blocks, facts, floor, start, stop, sums, num_tiles, k, out,
    EXACT: tl.constexpr, FULL_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every tile writes behind what the tiles before it found; nothing beyond out[k]. out[0]: how many."""
    limit = tl.load(floor).to(bits.dtype.element_ty)
    number = tl.load(facts + 1).to(tl.int32)
    total = tl.load(sums + num_tiles - 1)
    if tl.program_id(0) == 0:
        tl.store(out, (total >> 32).to(tl.int32))
    for tile in range(tl.program_id(0), tl.cdiv(number, ROWS), tl.num_programs(0)):
        before = tl.load(sums + tile - 1, mask=tile > 0, other=0)
        if tl.load(sums + tile) != before:
            where, key, inside = look(bits, blocks, number, tile, start, stop, FULL_MASK, ROWS, BLOCK)
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


def _shape(values: Tensor, layout: Layout, passing: Passing, exact: bool) -> dict[str, Any]:
    full_mask = torch.iinfo(int_type(values.dtype)).max
    return {"EXACT": exact, "FULL_MASK": full_mask, "ROWS": passing.rows, "BLOCK": layout.block, **OPTIONS}


def count_tiles(
    values: Tensor, layout: Layout, passing: Passing, floor: Tensor, exact: bool, start: int, stop: int
) -> Tensor:
    """Counts the elements of a window in each tile of listed blocks.

    Args:
        passing: the list.
        floor: int64, its first word is meant: magnitude bits.
        exact: count what is above the floor and what is equal to it apart; otherwise both together.
        start, stop: the window.

    Returns:
        int64, one per tile: what is above in the upper half, what is equal in the lower half (if exact).
    """
    tiles = passing.num_tiles
    counts = torch.empty(tiles, dtype=torch.int64, device=values.device)
    _count_kernel[(min(tiles, MAX_PROGRAMS),)](
        values.view(int_type(values.dtype)), passing.blocks, passing.facts, floor, start, stop, counts, tiles,
        **_shape(values, layout, passing, exact),
    )  # fmt: skip
    return counts


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
    """Count, running sum, write; the first word of the result is the count (if exact, of those above)."""
    tiles = passing.num_tiles
    out = torch.empty(k + 1, dtype=torch.int32, device=values.device)
    sums = count_tiles(values, layout, passing, floor, exact, start, stop).cumsum(0)
    _write_kernel[(min(tiles, MAX_PROGRAMS),)](
        values.view(int_type(values.dtype)), passing.blocks, passing.facts, floor, start, stop, sums, tiles,
        k, out, **_shape(values, layout, passing, exact),
    )  # fmt: skip
    return out


def at_least(
    values: Tensor, maxima: Tensor, layout: Layout, bits: int, start: int, stop: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """See `plain.at_least`."""
    passing = list_blocks(maxima, layout.block, start, stop, bits)
    # The bound of the list is the threshold.
    out = _select(values, layout, passing, passing.facts, False, start, stop, capacity)
    return out[:1], out[1:]


def largest(
    values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int, dense: bool
) -> tuple[Tensor, Tensor]:
    """See `plain.largest`."""
    report, passing = find_kth(values, maxima, layout, k, start, stop, dense)
    if passing is None:
        passing = list_blocks(maxima, layout.block, start, stop, 0)
    out = _select(values, layout, passing, report, True, start, stop, k)
    return report, out[1:]
