"""GPU kernels that write: the one pass over all elements, block maxima, and changes of k elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.kernels.layout import Layout
from horovod_sparse.tensors.triton.blocks import OPTIONS, is_finite, magnitude, num_programs, quotient, root

# Elements per program of 4 warps: a thread has four 16-byte loads per array in flight, and few enough
# registers that five programs share a multiprocessor, so that some load while others compute.
_TILE = 2048
# Sums of squares that the program of the report reads at a time.
_CHUNK = 8192


@triton.jit
def _fold_tile(  # type: ignore[no-untyped-def]
    values, gradient, companion, maxima, factors, squares, trouble, first, n,
    PLAIN: tl.constexpr, MOMENTUM: tl.constexpr, MOMENT: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Folds a tile of ROWS blocks from element `first` on; MASKED: the tile may reach beyond n."""
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
    if MOMENT:
        companion += first
        before = tl.load(companion + local, mask=mask, other=other)
        after = before * tl.load(factors + 1) + tl.load(factors + 2) * (step * step)
        wrong_step = is_finite(after) == 0
        tl.store(companion + local, tl.where(wrong_step, before, after), mask=mask)
        step = quotient(
            tl.load(factors + 3) * step, root(after + tl.load(factors + 5)) + tl.load(factors + 4)
        )
        step = tl.where(wrong_step, 0.0, step)
    if MOMENTUM:
        companion += first
        wrong_step = is_finite(step) == 0
        step = tl.where(wrong_step, 0.0, step)
        coasting = tl.load(companion + local, mask=mask, other=other) * tl.load(factors + 1)
        speed = coasting + step
        wrong_speed = is_finite(speed) == 0
        speed = tl.where(wrong_speed, coasting, speed)
        tl.store(companion + local, speed, mask=mask)
        step = tl.load(factors + 2) * step + tl.load(factors + 3) * speed
    total = kept + step
    overflow = is_finite(total) == 0
    new = tl.where(overflow, tl.where(is_finite(kept), kept, old), total)
    tl.store(values + local, new, mask=mask)
    tops = tl.max(magnitude(new), axis=1)
    blocks = first // BLOCK + rows
    if MASKED:
        tl.store(maxima + blocks, tops, mask=blocks * BLOCK < n)
    else:
        tl.store(maxima + blocks, tops)

    wrong = overflow
    if MOMENT:
        wrong = wrong | wrong_step
    if MOMENTUM:
        wrong = wrong | wrong_step | wrong_speed
    square = tl.sum(tl.sum(new * new, axis=1).to(tl.float64), axis=0)
    # Where float32 squares overflow, or vanish. NaN compares false.
    if (square > 1e-25 and square < 1e38) == 0:
        wide = new.to(tl.float64)
        square = tl.sum(tl.sum(wide * wide, axis=1), axis=0)
    tl.store(squares + tl.program_id(0), square)
    # Nothing outside n is wrong: zeros were read there.
    count = tl.sum(tl.sum(wrong.to(tl.int32), axis=1), axis=0)
    if count > 0:
        earliest = tl.min(tl.min(tl.where(wrong, local, ROWS * BLOCK), axis=1), axis=0)
        # How far from the end: the largest wins, and 0 says that there is none.
        tl.atomic_add(trouble, count.to(tl.int64))
        tl.atomic_max(trouble + 1, n - (first + earliest))


@triton.jit(do_not_specialize=["n"])
def _fold_kernel(  # type: ignore[no-untyped-def]
    values, gradient, companion, maxima, factors, squares, trouble, n,
    PLAIN: tl.constexpr, MOMENTUM: tl.constexpr, MOMENT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = program.to(tl.int64) * (ROWS * BLOCK)
    # Two bodies: with a mask on every access the loads would not be 16 bytes wide.
    if first + ROWS * BLOCK <= n:
        _fold_tile(
            values, gradient, companion, maxima, factors, squares, trouble, first, n,
            PLAIN, MOMENTUM, MOMENT, False, ROWS, BLOCK,
        )  # fmt: skip
    else:
        _fold_tile(
            values, gradient, companion, maxima, factors, squares, trouble, first, n,
            PLAIN, MOMENTUM, MOMENT, True, ROWS, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n", "num_programs"])
def _report_kernel(  # type: ignore[no-untyped-def]
    squares, trouble, factors, square_norm, report, n, num_programs, CHUNK: tl.constexpr
):
    """Adds up all tiles' sums of squares in a fixed order, and writes the fold's report."""
    lanes = tl.arange(0, CHUNK)
    sums = tl.zeros([CHUNK], tl.float64)
    for start in range(0, num_programs, CHUNK):
        sums += tl.load(squares + start + lanes, mask=start + lanes < num_programs, other=0.0)
    decay = tl.load(factors).to(tl.float64)
    tl.store(report, tl.load(trouble).to(tl.float64))
    tl.store(report + 1, (n - tl.load(trouble + 1)).to(tl.float64))
    tl.store(report + 2, tl.sum(sums, axis=0))
    tl.store(report + 3, decay * decay * tl.load(square_norm))


def fold(
    values: Tensor,
    gradient: Tensor,
    maxima: Tensor,
    layout: Layout,
    factors: Tensor,
    square_norm: Tensor,
    companion: Tensor | None = None,
    moment: bool = False,
    plain: bool = False,
) -> Tensor:
    n, block = layout.num_elements, layout.block
    # Three arrays, or words of 64 bits, fill the registers with half as many elements.
    tile = max(_TILE >> ((companion is not None) + (values.dtype == torch.float64)), block)
    grid = num_programs(n, tile)
    squares = torch.empty(grid, dtype=torch.float64, device=values.device)
    trouble = torch.zeros(2, dtype=torch.int64, device=values.device)
    report = torch.empty(4, dtype=torch.float64, device=values.device)
    _fold_kernel[(grid,)](
        values, gradient, values if companion is None else companion, maxima, factors, squares, trouble, n,
        PLAIN=plain, MOMENTUM=companion is not None and not moment, MOMENT=moment,
        ROWS=tile // block, BLOCK=block,
        **(OPTIONS | {"num_warps": 4}),
    )  # fmt: skip
    _report_kernel[(1,)](
        squares, trouble, factors, square_norm, report, n, grid, CHUNK=_CHUNK, **(OPTIONS | {"num_warps": 16})
    )
    return report


# Elements whose blocks one program looks at.
_REFRESHED = 32


@triton.jit(do_not_specialize=["n", "k"])
def _refresh_kernel(  # type: ignore[no-untyped-def]
    values, maxima, indices, n, k, LANES: tl.constexpr, BLOCK: tl.constexpr
):
    # Elements of one block all compute and store the same maximum.
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lanes < k
    blocks = (tl.load(indices + lanes, mask=mask, other=0) // BLOCK).to(tl.int64)
    where = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    new = tl.load(values + where, mask=mask[:, None] & (where < n), other=0.0)
    tl.store(maxima + blocks, tl.max(magnitude(new), axis=1), mask=mask)


def refresh_maxima(values: Tensor, maxima: Tensor, layout: Layout, indices: Tensor) -> None:
    k = indices.numel()
    _refresh_kernel[(num_programs(k, _REFRESHED),)](
        values, maxima, indices, layout.num_elements, k, LANES=_REFRESHED, BLOCK=layout.block, **OPTIONS
    )


# Elements per program: every one is a memory transaction of its own, so many small programs.
_LANES = 256
_OPTIONS = OPTIONS | {"num_warps": 4}


@triton.jit(do_not_specialize=["k"])
def _put_kernel(  # type: ignore[no-untyped-def]
    values, indices, new, k, ADD: tl.constexpr, CLEAR: tl.constexpr, LANES: tl.constexpr
):
    """Writes values[indices] = new, or with ADD values[indices] + new, or with CLEAR 0."""
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lanes < k
    where = tl.load(indices + lanes, mask=mask, other=0)
    if CLEAR:
        after = tl.zeros([LANES], values.dtype.element_ty)
    else:
        after = tl.load(new + lanes, mask=mask, other=0.0)
    if ADD:
        after = tl.load(values + where, mask=mask, other=0.0) + after
    tl.store(values + where, after, mask=mask)


def _launch_put(values: Tensor, indices: Tensor, new: Tensor, **how: bool) -> None:
    k = indices.numel()
    _put_kernel[(num_programs(k, _LANES),)](values, indices, new, k, LANES=_LANES, **how, **_OPTIONS)


def zero(values: Tensor, indices: Tensor) -> None:
    _launch_put(values, indices, values, ADD=False, CLEAR=True)


def put(values: Tensor, indices: Tensor, new: Tensor) -> None:
    _launch_put(values, indices, new, ADD=False, CLEAR=False)


def add(values: Tensor, indices: Tensor, new: Tensor) -> None:
    _launch_put(values, indices, new, ADD=True, CLEAR=False)


@triton.jit
def _signed_bits(values):  # type: ignore[no-untyped-def]
    """Returns the bits as a signed integer of the same width."""
    if values.dtype.primitive_bitwidth == 16:
        bits = values.to(tl.int16, bitcast=True)
    elif values.dtype.primitive_bitwidth == 64:
        bits = values.to(tl.int64, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _to_half(total, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Converts float32 to a half type, rounding to nearest, ties to even."""
    if kind == tl.bfloat16:
        # In integers: neither every GPU nor Triton's interpreter rounds to bfloat16 this way.
        raw = total.to(tl.uint32, bitcast=True)
        rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
        rounded = tl.where((raw & 0x7FFFFFFF) > 0x7F800000, (raw >> 16) | 0x40, rounded)
        narrow = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = total.to(kind)
    return narrow


@triton.jit(do_not_specialize=["k"])
def _add_sum_kernel(  # type: ignore[no-untyped-def]
    dense, indices, new, touches, k, HALF: tl.constexpr, UNIQUE: tl.constexpr, LANES: tl.constexpr
):
    """Adds values at sorted, repeated indices: the first lane of equal indices adds all of theirs."""
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lanes < k
    where = tl.load(indices + lanes, mask=mask, other=-1)
    if not UNIQUE:
        mask = mask & (where != tl.load(indices + lanes - 1, mask=mask & (lanes > 0), other=-1))
    before = tl.load(dense + where, mask=mask, other=0.0)
    untouched = _signed_bits(before) == 0
    total = before.to(new.dtype.element_ty) + tl.load(new + lanes, mask=mask, other=0.0)
    if not UNIQUE:
        at = lanes + 1
        more = mask & (at < k)
        more = more & (tl.load(indices + at, mask=more, other=-1) == where)
        while tl.max(more.to(tl.int32), axis=0) > 0:
            total = tl.where(more, total + tl.load(new + at, mask=more, other=0.0), total)
            at += 1
            more = more & (at < k)
            more = more & (tl.load(indices + at, mask=more, other=-1) == where)
    if HALF:
        tl.store(dense + where, _to_half(total, dense.dtype.element_ty), mask=mask)
    else:
        # +0.0 means untouched; -0.0 is the same number. By its bits: a constant -0.0 loses its sign here.
        raw = _signed_bits(total)
        sign = tl.full([LANES], 1, raw.dtype) << (raw.dtype.primitive_bitwidth - 1)
        total = tl.where(raw == 0, sign, raw).to(total.dtype, bitcast=True)
        tl.store(dense + where, total, mask=mask)
    tl.atomic_add(touches, tl.sum((mask & untouched).to(tl.int32), axis=0))


def add_sum(dense: Tensor, indices: Tensor, new: Tensor, unique: bool) -> Tensor:
    k = indices.numel()
    touches = torch.zeros(1, dtype=torch.int32, device=dense.device)
    _add_sum_kernel[(num_programs(k, _LANES),)](
        dense, indices, new, touches, k, HALF=dense.itemsize == 2, UNIQUE=unique, LANES=_LANES, **_OPTIONS
    )
    return touches
