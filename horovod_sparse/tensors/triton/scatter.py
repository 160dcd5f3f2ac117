"""What touches k elements only, on a GPU: clear, put, add, the sum's scatter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.tensors.triton.blocks import OPTIONS, programs

# Elements per program: every one is a memory transaction of its own, so many small programs.
_LANES = 256
_OPTIONS = OPTIONS | {"num_warps": 4}


@triton.jit(do_not_specialize=["k"])
def _put_kernel(  # type: ignore[no-untyped-def]
    values, indices, new, k, ADD: tl.constexpr, CLEAR: tl.constexpr, LANES: tl.constexpr
):
    """values[indices] = new, or what stands there + new, or 0."""
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


def zero(values: Tensor, indices: Tensor) -> None:
    k = indices.numel()
    _put_kernel[(programs(k, _LANES),)](
        values, indices, values, k, ADD=False, CLEAR=True, LANES=_LANES, **_OPTIONS
    )


def put(values: Tensor, indices: Tensor, new: Tensor) -> None:
    k = indices.numel()
    _put_kernel[(programs(k, _LANES),)](
        values, indices, new, k, ADD=False, CLEAR=False, LANES=_LANES, **_OPTIONS
    )


def add(values: Tensor, indices: Tensor, new: Tensor) -> None:
    k = indices.numel()
    _put_kernel[(programs(k, _LANES),)](
        values, indices, new, k, ADD=True, CLEAR=False, LANES=_LANES, **_OPTIONS
    )


@triton.jit
def _raw(values):  # type: ignore[no-untyped-def]
    """The bits, as a signed integer of the same width."""
    if values.dtype.primitive_bitwidth == 16:
        bits = values.to(tl.int16, bitcast=True)
    elif values.dtype.primitive_bitwidth == 64:
        bits = values.to(tl.int64, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _narrow(total, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 to a half type, to nearest, ties to even."""
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
    """The lane at the head of a run of equal indices adds the run, one after the other."""
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lanes < k
    where = tl.load(indices + lanes, mask=mask, other=-1)
    if not UNIQUE:
        mask = mask & (where != tl.load(indices + lanes - 1, mask=mask & (lanes > 0), other=-1))
    before = tl.load(dense + where, mask=mask, other=0.0)
    untouched = _raw(before) == 0
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
        tl.store(dense + where, _narrow(total, dense.dtype.element_ty), mask=mask)
    else:
        # +0.0 means untouched; -0.0 is the same number. By its bits: a constant -0.0 loses its sign here.
        raw = _raw(total)
        sign = tl.full([LANES], 1, raw.dtype) << (raw.dtype.primitive_bitwidth - 1)
        total = tl.where(raw == 0, sign, raw).to(total.dtype, bitcast=True)
        tl.store(dense + where, total, mask=mask)
    tl.atomic_add(touches, tl.sum((mask & untouched).to(tl.int32), axis=0))


def add_sum(dense: Tensor, indices: Tensor, new: Tensor, unique: bool) -> Tensor:
    k = indices.numel()
    touches = torch.zeros(1, dtype=torch.int32, device=dense.device)
    _add_sum_kernel[(programs(k, _LANES),)](
        dense, indices, new, touches, k, HALF=dense.itemsize == 2, UNIQUE=unique, LANES=_LANES, **_OPTIONS
    )
    return touches
