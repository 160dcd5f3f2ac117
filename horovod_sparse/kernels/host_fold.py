"""The one pass over all elements: accumulate, clear the gradient, leave block maxima."""

from __future__ import annotations

import math

import numpy as np

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.scalars import as_key, infinity, magnitude, read

__all__ = ["GRANULE", "TILE", "fold_plain", "squares_of"]

# Elements that are checked together before anything is written; blocks are multiples of it.
GRANULE = 2 * v.LANES
# Elements whose squares are summed in the accumulator's own precision before they go to float64.
TILE = 4096


@kernel
def squares_of(values, start, stop):  # type: ignore[no-untyped-def]
    """Sum of squares of [start, stop) in float64: where float32 would overflow, underflow or be unequal."""
    total = 0.0
    for i in range(start, stop):
        total += np.float64(values[i]) * np.float64(values[i])
    return total


@kernel
def _fold_slowly(values, gradient, start, stop, decay, report, kept=None):  # type: ignore[no-untyped-def]
    """[start, stop) element by element, with what is not finite taken as 0; returns the maximum."""
    top = as_key(magnitude(values[start]), 0)
    for i in range(start, stop):
        old = values[i]
        carried = decay * old
        new = carried + read(gradient, i)
        if not math.isfinite(new):
            if report[1] < 0:
                report[1] = i
            report[0] += 1
            new = carried if math.isfinite(carried) else old
        values[i] = new
        if kept is None:
            gradient[i] = 0
        top = max(top, magnitude(new))
    return top


@kernel
def fold_plain(values, gradient, maxima, block, decay, report, kept=None):  # type: ignore[no-untyped-def]
    """values = decay * values + gradient; gradient = 0; maxima of blocks.

    Nothing of a granule is written before its maximum is known. Magnitude bits order like the
    magnitudes with Inf and NaN on top, so one comparison per granule finds whatever is not finite,
    and the old values are still there for the slow way.

    Args:
        values: float32 or float64, shape (n,), finite.
        gradient: shape (n,), float of the same type, or the bits of a half type (see lanes.py).
        maxima: uint32 or uint64, shape (ceil(n / block),), overwritten with magnitude bits.
        block: elements per block, a multiple of `GRANULE`.
        decay: factor of the old values, of the type of values.
        report: float64, shape (3,), added to: how many elements were not finite, position of the
            first (set if it is < 0), sum of squares of the new values.
        kept: True leaves the gradient as it is; None, which sets it to 0, is compiled as if the question
            were not there.
    """
    n = values.size
    if n == 0:
        return
    decays = v.splat(decay)
    limit = infinity(maxima[0])
    whole = n // GRANULE * GRANULE
    per_tile = max(TILE // block, 1) * block
    for tile in range(0, whole, per_tile):
        tile_stop = min(tile + per_tile, whole)
        squares = v.zeros_like(decays)
        tile_top = as_key(limit, 0)
        slow = False
        for start in range(tile, tile_stop, block):
            stop = min(start + block, tile_stop)
            top = as_key(limit, 0)
            for i in range(start, stop, GRANULE):
                a = v.add(v.multiply(decays, v.load(values, i)), v.load(gradient, i))
                b = v.add(v.multiply(decays, v.load(values, i + v.LANES)), v.load(gradient, i + v.LANES))
                high = v.top_of(v.larger(v.magnitudes(a), v.magnitudes(b)))
                if high >= limit:
                    high = _fold_slowly(values, gradient, i, i + GRANULE, decay, report, kept)
                    slow = True
                else:
                    v.store(values, i, a)
                    v.store(values, i + v.LANES, b)
                    if kept is None:
                        v.store(gradient, i, v.zeros_like(a))
                        v.store(gradient, i + v.LANES, v.zeros_like(a))
                    squares = v.add(squares, v.add(v.multiply(a, a), v.multiply(b, b)))
                top = max(top, high)
            maxima[start // block] = top
            tile_top = max(tile_top, top)
        total = v.sum_of(squares)
        if tile_top > as_key(limit, 0) and (slow or not 1e-30 < total < math.inf):
            total = squares_of(values, tile, tile_stop)
        report[2] += total
    if whole < n:
        top = _fold_slowly(values, gradient, whole, n, decay, report, kept)
        report[2] += squares_of(values, whole, n)
        last = whole // block
        maxima[last] = top if whole % block == 0 else max(maxima[last], top)
