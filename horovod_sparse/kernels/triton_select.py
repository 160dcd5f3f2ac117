"""Selection on a GPU: positions in ascending order, by counting, a running sum, and writing.

Both passes look only into blocks whose maximum passes; the second mostly finds them in the cache.
What is selected is said by two numbers: a floor of magnitude bits, and how many of those equal to the
floor belong to the selection (the first ones). A threshold is the floor below it, and none of those.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.kernels.layout import Layout
from horovod_sparse.kernels.triton_bits import TILE, WARPS, magnitude, programs
from horovod_sparse.kernels.triton_kth import kth

__all__ = ["at_least", "largest"]


@triton.jit
def _look(  # type: ignore[no-untyped-def]
    values, maxima, floor, start, stop, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Positions of this program's tile, and which of them are above the floor and equal to it."""
    blocks = (start // BLOCK).to(tl.int64) + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = blocks * BLOCK < stop
    tops = tl.load(maxima + blocks, mask=exists, other=0)
    floor = floor.to(tops.dtype)
    passes = exists & (tops > floor)
    if EXACT:
        passes = exists & (tops >= floor)
    where = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = passes[:, None] & (where >= start) & (where < stop)
    key = magnitude(tl.load(values + where, mask=inside, other=0.0))
    above = inside & (key > floor)
    equal = inside & (key == floor)
    return where, above, equal


@triton.jit(do_not_specialize=["floor", "start", "stop"])
def _count_kernel(  # type: ignore[no-untyped-def]
    values, maxima, floor, floor_pointer, start, stop, counts,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per tile: how many are above the floor, in the upper half of the word; equal to it, in the lower."""
    if EXACT:
        _, above, equal = _look(values, maxima, tl.load(floor_pointer), start, stop, EXACT, ROWS, BLOCK)
    else:
        _, above, equal = _look(values, maxima, tl.cast(floor, tl.int64), start, stop, EXACT, ROWS, BLOCK)
    count = tl.sum(tl.sum(above.to(tl.int32), axis=1), axis=0).to(tl.int64) << 32
    if EXACT:
        count += tl.sum(tl.sum(equal.to(tl.int32), axis=1), axis=0)
    tl.store(counts + tl.program_id(0), count)


@triton.jit(do_not_specialize=["floor", "start", "stop", "k"])
def _write_kernel(  # type: ignore[no-untyped-def]
    values, maxima, floor, floor_pointer, start, stop, sums, num_tiles, k, out,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every tile writes behind what the tiles before it found; nothing beyond out[k]. out[0]: how many."""
    program = tl.program_id(0)
    total = tl.load(sums + num_tiles - 1)
    up_to = tl.load(sums + program)
    before = tl.load(sums + program - 1, mask=program > 0, other=0)
    if program == 0:
        tl.store(out, (total >> 32).to(tl.int32))
    if up_to != before:
        if EXACT:
            where, above, equal = _look(
                values, maxima, tl.load(floor_pointer), start, stop, EXACT, ROWS, BLOCK
            )
        else:
            where, above, equal = _look(
                values, maxima, tl.cast(floor, tl.int64), start, stop, EXACT, ROWS, BLOCK
            )
        where = tl.reshape(where, [ROWS * BLOCK])
        chosen = tl.reshape(above, [ROWS * BLOCK])
        place = before >> 32
        if EXACT:
            # Ties: as many as are missing to k, the first ones.
            ties = k - (total >> 32)
            before_equal = before & 0xFFFFFFFF
            equals = tl.reshape(equal, [ROWS * BLOCK])
            rank = before_equal + tl.cumsum(equals.to(tl.int32), axis=0)
            chosen = chosen | (equals & (rank <= ties))
            place += tl.minimum(before_equal, ties)
        slot = place + tl.cumsum(chosen.to(tl.int32), axis=0)
        tl.store(out + slot, where.to(tl.int32), mask=chosen & (slot <= k))


def _select(
    values: Tensor, maxima: Tensor, layout: Layout, floor: int | Tensor, start: int, stop: int, k: int
) -> Tensor:
    """Count, running sum, write; the first word of the result is the count above the floor."""
    block, exact = layout.block, isinstance(floor, Tensor)
    rows = TILE // block
    tiles = programs(-(-stop // block) - start // block, rows)
    counts = torch.empty(tiles, dtype=torch.int64, device=values.device)
    out = torch.empty(k + 1, dtype=torch.int32, device=values.device)
    shape = {"EXACT": exact, "ROWS": rows, "BLOCK": block, "num_warps": WARPS}
    number, pointer = (0, floor) if isinstance(floor, Tensor) else (floor, counts)
    _count_kernel[(tiles,)](values, maxima, number, pointer, start, stop, counts, **shape)
    sums = counts.cumsum(0)
    _write_kernel[(tiles,)](values, maxima, number, pointer, start, stop, sums, tiles, k, out, **shape)
    return out


def at_least(
    values: Tensor, maxima: Tensor, layout: Layout, bits: int, start: int, stop: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """See `torch_plain.at_least`."""
    out = _select(values, maxima, layout, bits - 1, start, stop, capacity)
    return out[:1], out[1:]


def largest(
    values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int, dense: bool
) -> tuple[Tensor, Tensor]:
    """See `torch_plain.largest`."""
    report = kth(values, maxima, layout, k, start, stop, dense)
    out = _select(values, maxima, layout, report, start, stop, k)
    return report, out[1:]
