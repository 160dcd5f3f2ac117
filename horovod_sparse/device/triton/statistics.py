"""What threshold rules ask of all magnitudes, on a GPU: counts above thresholds, and moments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.device.triton.bits import OPTIONS, magnitude, programs
from horovod_sparse.device.triton.blocks import list_blocks
from horovod_sparse.device.triton.select import count_tiles
from horovod_sparse.kernels.layout import Layout

__all__ = ["count_at_least", "moments"]

_TILE = 2048


def count_at_least(values: Tensor, maxima: Tensor, layout: Layout, thresholds: Sequence[int]) -> Tensor:
    """See `plain.count_at_least`."""
    counts = []
    for bits in thresholds:
        passing = list_blocks(maxima, layout.block, 0, layout.num_elements, bits)
        tiles = count_tiles(values, layout, passing, passing.facts, False, 0, layout.num_elements)
        counts.append(tiles.sum() >> 32)
    return torch.stack(counts) if counts else torch.zeros(0, dtype=torch.int64, device=values.device)


@triton.jit(do_not_specialize=["n", "threshold"])
def _moments_kernel(  # type: ignore[no-untyped-def]
    values, n, threshold, partials, num_programs, TILE: tl.constexpr
):
    """Per tile: number, sum, sum of squares and sum of logarithms, each in its row of `partials`."""
    program = tl.program_id(0)
    first = program.to(tl.int64) * TILE
    local = tl.arange(0, TILE)
    here = tl.load(values + first + local, mask=local < n - first, other=0.0)
    chosen = magnitude(here) >= tl.cast(threshold, tl.int64).to(magnitude(here).dtype)
    size = tl.where(chosen, tl.abs(here), 1.0)
    # The logarithm takes subnormal numbers as 0, so they are made larger first: 2**64 = e**44.36...
    tiny = size < 1e-30
    logarithm = tl.log(tl.where(tiny, size * 18446744073709551616.0, size)).to(tl.float64)
    logarithm = tl.where(tiny, logarithm - 44.3614195558364998, logarithm)
    size = tl.where(chosen, size, 0.0).to(tl.float64)
    tl.store(partials + program, tl.sum(chosen.to(tl.int32), axis=0).to(tl.float64))
    tl.store(partials + num_programs + program, tl.sum(size, axis=0))
    tl.store(partials + 2 * num_programs + program, tl.sum(size * size, axis=0))
    tl.store(partials + 3 * num_programs + program, tl.sum(tl.where(chosen, logarithm, 0.0), axis=0))


def moments(values: Tensor, bits: int) -> Tensor:
    """See `plain.moments`."""
    grid = programs(values.numel(), _TILE)
    partials = torch.empty((4, grid), dtype=torch.float64, device=values.device)
    _moments_kernel[(grid,)](values, values.numel(), bits, partials, grid, TILE=_TILE, **OPTIONS)
    return partials.sum(1)
