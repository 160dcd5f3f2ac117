"""The fold with momentum correction (Lin et al. 2018): each rank has its own velocity, before selection."""

from __future__ import annotations

import math

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.host_fold import GRANULE, TILE, squares_of
from horovod_sparse.kernels.scalars import as_key, infinity, magnitude, read

__all__ = ["fold_momentum"]


@kernel
def _fold_slowly(  # type: ignore[no-untyped-def]
    values, velocity, gradient, start, stop, factors, report, kept=None
):
    """[start, stop) element by element, with what is not finite taken as 0; returns the maximum."""
    decay, momentum, from_gradient, from_velocity = factors[0], factors[1], factors[2], factors[3]
    top = as_key(magnitude(values[start]), 0)
    for i in range(start, stop):
        old, old_velocity, step = values[i], velocity[i], read(gradient, i)
        wrong = not math.isfinite(step)
        if wrong:
            step = old - old  # 0 of the same type: a literal would make all this float64
        speed = momentum * old_velocity + step
        if not math.isfinite(speed):
            wrong, speed = True, momentum * old_velocity
        carried = decay * old
        new = carried + (from_gradient * step + from_velocity * speed)
        if not math.isfinite(new):
            wrong, new = True, carried if math.isfinite(carried) else old
        if wrong:
            if report[1] < 0:
                report[1] = i
            report[0] += 1
        values[i] = new
        velocity[i] = speed
        if kept is None:
            gradient[i] = 0
        top = max(top, magnitude(new))
    return top


@kernel
def fold_momentum(  # type: ignore[no-untyped-def]
    values, velocity, gradient, maxima, block, factors, report, kept=None
):
    """velocity = momentum * velocity + gradient; values = decay * values + step; gradient = 0; maxima.

    Args:
        values, gradient, maxima, block, report, kept: as in `fold_plain`.
        velocity: like values.
        factors: shape (4,), of the type of values: decay, momentum, and step = factors[2] * gradient +
            factors[3] * velocity: (0, 1) for momentum, (1, momentum) in Nesterov's form.
    """
    n = values.size
    if n == 0:
        return
    decay, momentum = v.splat(factors[0]), v.splat(factors[1])
    from_gradient, from_velocity = v.splat(factors[2]), v.splat(factors[3])
    limit = infinity(maxima[0])
    whole = n // GRANULE * GRANULE
    per_tile = max(TILE // block, 1) * block
    for tile in range(0, whole, per_tile):
        tile_stop = min(tile + per_tile, whole)
        squares = v.zeros_like(decay)
        tile_top = as_key(limit, 0)
        slow = False
        for start in range(tile, tile_stop, block):
            stop = min(start + block, tile_stop)
            top = as_key(limit, 0)
            for i in range(start, stop, GRANULE):
                j = i + v.LANES
                ga, gb = v.load(gradient, i), v.load(gradient, j)
                ua = v.add(v.multiply(momentum, v.load(velocity, i)), ga)
                ub = v.add(v.multiply(momentum, v.load(velocity, j)), gb)
                a = v.add(v.multiply(from_gradient, ga), v.multiply(from_velocity, ua))
                b = v.add(v.multiply(from_gradient, gb), v.multiply(from_velocity, ub))
                a = v.add(v.multiply(decay, v.load(values, i)), a)
                b = v.add(v.multiply(decay, v.load(values, j)), b)
                # An Inf of gradient or velocity stays one in the sum (0 * Inf is NaN).
                high = v.top_of(v.larger(v.magnitudes(a), v.magnitudes(b)))
                if high >= limit:
                    high = _fold_slowly(values, velocity, gradient, i, i + GRANULE, factors, report, kept)
                    slow = True
                else:
                    v.store(values, i, a)
                    v.store(values, j, b)
                    v.store(velocity, i, ua)
                    v.store(velocity, j, ub)
                    if kept is None:
                        v.store(gradient, i, v.zeros_like(a))
                        v.store(gradient, j, v.zeros_like(a))
                    squares = v.add(squares, v.add(v.multiply(a, a), v.multiply(b, b)))
                top = max(top, high)
            maxima[start // block] = top
            tile_top = max(tile_top, top)
        total = v.sum_of(squares)
        if tile_top > as_key(limit, 0) and (slow or not 1e-30 < total < math.inf):
            total = squares_of(values, tile, tile_stop)
        report[2] += total
    if whole < n:
        top = _fold_slowly(values, velocity, gradient, whole, n, factors, report, kept)
        report[2] += squares_of(values, whole, n)
        last = whole // block
        maxima[last] = top if whole % block == 0 else max(maxima[last], top)
