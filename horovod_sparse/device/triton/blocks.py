"""The list of blocks whose maximum passes, in ascending order, on a GPU.

Few blocks pass, so the passes that open blocks go through this list: every program then has work, and
the work is the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.device.triton.bits import OPTIONS, TILE, programs
from horovod_sparse.device.triton.radix import BINS, Radix, advance

__all__ = ["MAX_PROGRAMS", "Passing", "list_blocks", "look"]

# Maxima per program.
_CHUNK = 4096
# Numbers of passing blocks that a program adds up at a time, to know where it writes.
_STRIDE = 512
# Programs of a pass over the list, whose length the host does not know: each goes on to further tiles.
MAX_PROGRAMS = 2112


@dataclass(frozen=True)
class Passing:
    """Blocks of a window whose maximum reaches a bound.

    Attributes:
        blocks: int32, their numbers, ascending; only the first `facts[1]` count.
        facts: int64, shape (2,): the bound, and how many blocks pass it.
        rows: blocks per tile.
    """

    blocks: Tensor
    facts: Tensor
    rows: int

    @property
    def num_tiles(self) -> int:
        """How many tiles there would be if all blocks passed."""
        return programs(self.blocks.numel(), self.rows)


@triton.jit(do_not_specialize=["bound", "first", "last", "k", "bound_shift"])
def _count_kernel(  # type: ignore[no-untyped-def]
    maxima, first, last, bound, counters, state, k, bound_shift, facts, counts,
    BOUND_DIGITS: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Settles the bound, and counts the passing blocks of each chunk."""
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
def _write_kernel(  # type: ignore[no-untyped-def]
    maxima, first, last, facts, counts, out, CHUNK: tl.constexpr, STRIDE: tl.constexpr
):
    """Every chunk writes its blocks behind those of the chunks before it."""
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
    radix: Radix | None = None,
    bound_digits: int = 0,
) -> Passing:
    """Lists the blocks that touch [start, stop) and whose maximum is >= the bound.

    Args:
        maxima: upper bounds, of the blocks' magnitude bits.
        block: elements per block.
        start, stop: the window, not empty.
        bound: magnitude bits.
        radix: if given, the bound is the k-th largest of what it counted, its lower digits 0, at least 1.
        bound_digits: how many digits it counted.

    Returns:
        The list.
    """
    first, last = start // block, -(-stop // block)
    device = maxima.device
    facts = torch.empty(2, dtype=torch.int64, device=device)
    blocks = torch.empty(last - first, dtype=torch.int32, device=device)
    chunks = programs(last - first, _CHUNK)
    counts = torch.empty(chunks, dtype=torch.int32, device=device)
    counters, state, k, shift = (counts, facts, 0, 0)
    if radix is not None:
        counters, state, k, shift = radix.counters, radix.state, radix.k, radix.digits[bound_digits - 1][0]
    _count_kernel[(chunks,)](
        maxima, first, last, bound, counters, state, k, shift, facts, counts,
        BOUND_DIGITS=bound_digits if radix is not None else 0, CHUNK=_CHUNK, BINS=BINS, **OPTIONS,
    )  # fmt: skip
    _write_kernel[(chunks,)](
        maxima, first, last, facts, counts, blocks, CHUNK=_CHUNK, STRIDE=_STRIDE, **OPTIONS
    )
    return Passing(blocks, facts, TILE // block)


@triton.jit
def look(  # type: ignore[no-untyped-def]
    values, blocks, total, tile, start, stop, FULL_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Positions and magnitude bits of one tile of listed blocks; which of them lie in the window.

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
