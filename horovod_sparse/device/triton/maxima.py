"""Block maxima without a fold, on a GPU: after an assignment, a clear, an addition."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.device.triton.bits import OPTIONS, TILE, magnitude, programs
from horovod_sparse.kernels.layout import Layout

__all__ = ["raise_maxima", "refresh_maxima", "scan_maxima"]

# Elements whose blocks one program looks at.
_LANES = 32


@triton.jit(do_not_specialize=["n"])
def _scan_kernel(values, maxima, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK)
    rows = tl.arange(0, ROWS)
    local = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    new = tl.load(values + first + local, mask=local < n - first, other=0.0)
    blocks = first // BLOCK + rows
    tl.store(maxima + blocks, tl.max(magnitude(new), axis=1), mask=blocks * BLOCK < n)


def scan_maxima(values: Tensor, maxima: Tensor, layout: Layout) -> None:
    """See `plain.scan_maxima`."""
    n, block = layout.num_elements, layout.block
    _scan_kernel[(programs(n),)](values, maxima, n, ROWS=TILE // block, BLOCK=block, **OPTIONS)


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
    """See `plain.refresh_maxima`."""
    k = indices.numel()
    _refresh_kernel[(programs(k, _LANES),)](
        values, maxima, indices, layout.num_elements, k, LANES=_LANES, BLOCK=layout.block, **OPTIONS
    )


@triton.jit(do_not_specialize=["block", "k"])
def _raise_kernel(values, maxima, indices, block, k, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = lanes < k
    where = tl.load(indices + lanes, mask=mask, other=0)
    new = tl.load(values + where, mask=mask, other=0.0)
    tl.atomic_max(maxima + where // block, magnitude(new), mask=mask)


def raise_maxima(values: Tensor, maxima: Tensor, layout: Layout, indices: Tensor) -> None:
    """See `plain.raise_maxima`."""
    k = indices.numel()
    _raise_kernel[(programs(k, 256),)](values, maxima, indices, layout.block, k, LANES=256, **OPTIONS)
