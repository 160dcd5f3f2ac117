"""The one pass over all elements on a GPU: accumulate, clear the gradient, leave block maxima."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.kernels.layout import Layout
from horovod_sparse.kernels.triton_bits import TILE, WARPS, is_finite, magnitude, programs

__all__ = ["fold"]

# Partial results that one program of the last reduction reads at a time.
_CHUNK = 2048


@triton.jit
def _fold_tile(  # type: ignore[no-untyped-def]
    values, gradient, velocity, maxima, factors, partials, first, n, num_programs,
    PLAIN: tl.constexpr, MOMENTUM: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS blocks from element `first` on; only a masked tile may reach beyond n."""
    rows = tl.arange(0, ROWS)
    local = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values += first
    gradient += first
    inside = local < n - first
    mask = inside if MASKED else None
    other = 0.0 if MASKED else None
    old = tl.load(values + local, mask=mask, other=other)
    step = tl.load(gradient + local, mask=mask, other=other).to(old.dtype)
    kept = old
    if not PLAIN:
        kept = old * tl.load(factors)
    if MOMENTUM:
        velocity += first
        wrong_step = is_finite(step) == 0
        step = tl.where(wrong_step, old * 0.0, step)
        coasting = tl.load(velocity + local, mask=mask, other=other) * tl.load(factors + 1)
        speed = coasting + step
        wrong_speed = is_finite(speed) == 0
        speed = tl.where(wrong_speed, coasting, speed)
        tl.store(velocity + local, speed, mask=mask)
        step = tl.load(factors + 2) * step + tl.load(factors + 3) * speed
    total = kept + step
    overflow = is_finite(total) == 0
    new = tl.where(overflow, tl.where(is_finite(kept), kept, old), total)
    tl.store(values + local, new, mask=mask)
    tl.store(gradient + local, tl.zeros([ROWS, BLOCK], gradient.dtype.element_ty), mask=mask)
    tops = tl.max(magnitude(new), axis=1)
    blocks = first // BLOCK + rows
    if MASKED:
        tl.store(maxima + blocks, tops, mask=blocks * BLOCK < n)
    else:
        tl.store(maxima + blocks, tops)

    wrong = overflow
    if MOMENTUM:
        wrong = wrong | wrong_step | wrong_speed
    # Nothing outside n is wrong: zeros were read there.
    count = tl.sum(tl.sum(wrong.to(tl.int32), axis=1), axis=0)
    earliest = tl.min(tl.min(tl.where(wrong, local, ROWS * BLOCK), axis=1), axis=0)
    square = tl.sum(tl.sum(new * new, axis=1).to(tl.float64), axis=0)
    # A position fits float64 exactly, so all partial results share one array.
    place = tl.where(count > 0, first + earliest, n.to(tl.int64))
    tl.store(partials, count.to(tl.float64))
    tl.store(partials + num_programs, place.to(tl.float64))
    tl.store(partials + 2 * num_programs, square)


@triton.jit(do_not_specialize=["n"])
def _fold_kernel(  # type: ignore[no-untyped-def]
    values, gradient, velocity, maxima, factors, partials, n, num_programs,
    PLAIN: tl.constexpr, MOMENTUM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = program.to(tl.int64) * (ROWS * BLOCK)
    partials += program
    # Two bodies: with a mask on every access the loads would not be 16 bytes wide.
    if first + ROWS * BLOCK <= n:
        _fold_tile(
            values, gradient, velocity, maxima, factors, partials, first, n, num_programs,
            PLAIN, MOMENTUM, False, ROWS, BLOCK,
        )  # fmt: skip
    else:
        _fold_tile(
            values, gradient, velocity, maxima, factors, partials, first, n, num_programs,
            PLAIN, MOMENTUM, True, ROWS, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_programs"])
def _reduce_kernel(  # type: ignore[no-untyped-def]
    partials, factors, square_norm, report, num_programs, CHUNK: tl.constexpr
):
    """One program: the partial results of all tiles, always in the same order."""
    lanes = tl.arange(0, CHUNK)
    count = tl.zeros([CHUNK], tl.float64)
    place = tl.full([CHUNK], float("inf"), tl.float64)
    square = tl.zeros([CHUNK], tl.float64)
    for start in range(0, num_programs, CHUNK):
        mask = start + lanes < num_programs
        here = partials + start + lanes
        count += tl.load(here, mask=mask, other=0.0)
        place = tl.minimum(place, tl.load(here + num_programs, mask=mask, other=float("inf")))
        square += tl.load(here + 2 * num_programs, mask=mask, other=0.0)
    tl.store(report, tl.sum(count, axis=0))
    tl.store(report + 1, tl.min(place, axis=0))
    tl.store(report + 2, tl.sum(square, axis=0))
    decay = tl.load(factors).to(tl.float64)
    tl.store(report + 3, decay * decay * tl.load(square_norm))


def fold(
    values: Tensor,
    gradient: Tensor,
    maxima: Tensor,
    layout: Layout,
    factors: Tensor,
    square_norm: Tensor,
    velocity: Tensor | None = None,
    plain: bool = False,
    tile: int = TILE,
    warps: int = WARPS,
) -> Tensor:
    """See `torch_plain.fold`; tile and warps are for measurements."""
    n, block = layout.num_elements, layout.block
    grid = programs(n, tile)
    partials = torch.empty((3, grid), dtype=torch.float64, device=values.device)
    report = torch.empty(4, dtype=torch.float64, device=values.device)
    # Contraction to fused multiply-add would round differently from the host.
    _fold_kernel[(grid,)](
        values, gradient, values if velocity is None else velocity, maxima, factors, partials, n, grid,
        PLAIN=plain, MOMENTUM=velocity is not None, ROWS=tile // block, BLOCK=block,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    _reduce_kernel[(1,)](partials, factors, square_norm, report, grid, CHUNK=_CHUNK, num_warps=8)
    return report
