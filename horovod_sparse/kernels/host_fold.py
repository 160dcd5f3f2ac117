"""The one pass over all elements: accumulate, clear the gradient, leave block maxima."""

from __future__ import annotations

import math

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.scalars import as_key, infinity, magnitude, read

__all__ = ["GRANULE", "fold_momentum", "fold_plain", "scan_maxima"]

# Elements that are checked together before anything is written; blocks are multiples of it.
GRANULE = 32
# Elements whose squares are summed in the accumulator's own precision before they go to float64.
_TILE = 4096


@kernel
def _fold_slowly(values, gradient, start, stop, decay, report):  # type: ignore[no-untyped-def]
    """[start, stop) element by element, with what is not finite taken as 0; returns the maximum."""
    top = as_key(magnitude(values[start]), 0)
    for i in range(start, stop):
        old = values[i]
        kept = decay * old
        new = kept + read(gradient, i)
        if not math.isfinite(new):
            if report[1] < 0:
                report[1] = i
            report[0] += 1
            new = kept if math.isfinite(kept) else old
        values[i] = new
        gradient[i] = 0
        top = max(top, magnitude(new))
        report[2] += float(new) * float(new)
    return top


@kernel
def fold_plain(values, gradient, maxima, block, decay, report):  # type: ignore[no-untyped-def]
    """values = decay * values + gradient; gradient = 0; maxima of blocks.

    Args:
        values: float32 or float64, shape (n,), finite.
        gradient: shape (n,), float of the same type, or the bits of a half type (see lanes.py).
        maxima: uint32 or uint64, shape (ceil(n / block),), overwritten with magnitude bits.
        block: elements per block, a multiple of `GRANULE`.
        decay: factor of the old values, of the type of values.
        report: float64, shape (3,), added to: how many elements were not finite, position of the
            first (set if it is < 0), sum of squares.
    """
    n = values.size
    if n == 0:
        return
    decays = v.splat(decay)
    limit = infinity(maxima[0])
    whole = n // GRANULE * GRANULE
    per_tile = max(_TILE // block, 1) * block
    for tile in range(0, whole, per_tile):
        tile_stop = min(tile + per_tile, whole)
        squares = v.zeros_like(decays)
        for start in range(tile, tile_stop, block):
            stop = min(start + block, tile_stop)
            top = as_key(maxima[0], 0)
            for i in range(start, stop, GRANULE):
                a = v.add(v.multiply(decays, v.load(values, i)), v.load(gradient, i))
                b = v.add(v.multiply(decays, v.load(values, i + 16)), v.load(gradient, i + 16))
                high = v.top_of(v.larger(v.magnitudes(a), v.magnitudes(b)))
                if high >= limit:
                    high = _fold_slowly(values, gradient, i, i + GRANULE, decay, report)
                else:
                    v.store(values, i, a)
                    v.store(values, i + 16, b)
                    v.store(gradient, i, v.zeros_like(a))
                    v.store(gradient, i + 16, v.zeros_like(a))
                    squares = v.add(squares, v.add(v.multiply(a, a), v.multiply(b, b)))
                top = max(top, high)
            maxima[start // block] = top
        report[2] += v.sum_of(squares)
    if whole < n:
        top = _fold_slowly(values, gradient, whole, n, decay, report)
        last = whole // block
        maxima[last] = top if whole % block == 0 else max(maxima[last], top)


@kernel
def _fold_momentum_slowly(values, velocity, gradient, start, stop, factors, report):  # type: ignore[no-untyped-def]
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
        kept = decay * old
        new = kept + (from_gradient * step + from_velocity * speed)
        if not math.isfinite(new):
            wrong, new = True, kept if math.isfinite(kept) else old
        if wrong:
            if report[1] < 0:
                report[1] = i
            report[0] += 1
        values[i] = new
        velocity[i] = speed
        gradient[i] = 0
        top = max(top, magnitude(new))
        report[2] += float(new) * float(new)
    return top


@kernel
def fold_momentum(values, velocity, gradient, maxima, block, factors, report):  # type: ignore[no-untyped-def]
    """velocity = momentum * velocity + gradient; values = decay * values + step; gradient = 0; maxima.

    Args:
        values, gradient, maxima, block, report: as in `fold_plain`.
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
    per_tile = max(_TILE // block, 1) * block
    for tile in range(0, whole, per_tile):
        tile_stop = min(tile + per_tile, whole)
        squares = v.zeros_like(decay)
        for start in range(tile, tile_stop, block):
            stop = min(start + block, tile_stop)
            top = as_key(maxima[0], 0)
            for i in range(start, stop, GRANULE):
                ga, gb = v.load(gradient, i), v.load(gradient, i + 16)
                ua = v.add(v.multiply(momentum, v.load(velocity, i)), ga)
                ub = v.add(v.multiply(momentum, v.load(velocity, i + 16)), gb)
                a = v.add(v.multiply(from_gradient, ga), v.multiply(from_velocity, ua))
                b = v.add(v.multiply(from_gradient, gb), v.multiply(from_velocity, ub))
                a = v.add(v.multiply(decay, v.load(values, i)), a)
                b = v.add(v.multiply(decay, v.load(values, i + 16)), b)
                high = v.top_of(v.larger(v.magnitudes(a), v.magnitudes(b)))
                # Momentum 0 can hide an Inf of the velocity from the sum, so it is looked at too.
                speed = v.top_of(v.larger(v.magnitudes(ua), v.magnitudes(ub)))
                if max(high, speed) >= limit:
                    high = _fold_momentum_slowly(values, velocity, gradient, i, i + GRANULE, factors, report)
                else:
                    v.store(values, i, a)
                    v.store(values, i + 16, b)
                    v.store(velocity, i, ua)
                    v.store(velocity, i + 16, ub)
                    v.store(gradient, i, v.zeros_like(a))
                    v.store(gradient, i + 16, v.zeros_like(a))
                    squares = v.add(squares, v.add(v.multiply(a, a), v.multiply(b, b)))
                top = max(top, high)
            maxima[start // block] = top
        report[2] += v.sum_of(squares)
    if whole < n:
        top = _fold_momentum_slowly(values, velocity, gradient, whole, n, factors, report)
        last = whole // block
        maxima[last] = top if whole % block == 0 else max(maxima[last], top)


@kernel
def scan_maxima(values, maxima, block):  # type: ignore[no-untyped-def]
    """Maxima of all blocks, without a gradient (after an assignment)."""
    n = values.size
    for j in range(maxima.size):
        start, stop = j * block, min(j * block + block, n)
        top = as_key(maxima[0], 0)
        i = start
        while i + GRANULE <= stop:
            top = max(
                top,
                v.top_of(v.larger(v.magnitudes(v.load(values, i)), v.magnitudes(v.load(values, i + 16)))),
            )
            i += GRANULE
        while i < stop:
            top = max(top, magnitude(values[i]))
            i += 1
        maxima[j] = top


@kernel
def refresh_maxima(values, maxima, block, indices):  # type: ignore[no-untyped-def]
    """Maxima of the blocks that hold the given elements (ascending order saves repeated work)."""
    n = values.size
    done = -1
    for index in indices:
        j = index // block
        if j == done:
            continue
        done = j
        top = as_key(maxima[0], 0)
        for i in range(j * block, min(j * block + block, n)):
            top = max(top, magnitude(values[i]))
        maxima[j] = top


@kernel
def raise_maxima(values, maxima, block, indices):  # type: ignore[no-untyped-def]
    """Makes the maxima upper bounds again after the given elements grew."""
    for index in indices:
        j = index // block
        maxima[j] = max(maxima[j], magnitude(values[index]))
