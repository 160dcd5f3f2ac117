"""The one pass over all elements: accumulate, clear the gradient, leave block maxima.

Plain, or with momentum correction (Lin et al. 2018), where each rank has a velocity of its own before
selection. Kernels first, then `fold`, which calls them for as many pieces as the gradient comes in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.lanes import as_key, infinity, magnitude, read
from horovod_sparse.kernels.layout import Layout

Array = NDArray[Any]

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
def _fold_slowly(  # type: ignore[no-untyped-def]
    values, gradient, start, stop, decay, report, kept=None, more=None, factors=None
):
    """[start, stop) element by element, with what is not finite taken as 0; returns the maximum."""
    top = as_key(magnitude(values[start]), 0)
    for i in range(start, stop):
        old = values[i]
        carried = decay * old
        if more is None:
            new = carried + read(gradient, i)
        else:
            new = carried + (factors[0] * read(gradient, i) + factors[1] * read(more, i))
        if not math.isfinite(new):
            if report[1] < 0:
                report[1] = i
            report[0] += 1
            new = carried if math.isfinite(carried) else old
        values[i] = new
        if kept is None:
            v.clear(gradient, i)
        top = max(top, magnitude(new))
    return top


@kernel
def fold_plain(  # type: ignore[no-untyped-def]
    values, gradient, maxima, block, decay, report, kept=None, more=None, factors=None
):
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
        more: like the gradient; None, or a second part of it, which is kept:
            factors[0] * gradient + factors[1] * more is folded.
        factors: shape (2,), of the type of values.
    """
    n = values.size
    if n == 0:
        return
    decays = v.splat(decay)
    if more is not None:
        of_one, of_other = v.splat(factors[0]), v.splat(factors[1])
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
                j = i + v.LANES
                ga, gb = v.load(gradient, i), v.load(gradient, j)
                if more is not None:
                    ga = v.add(v.multiply(of_one, ga), v.multiply(of_other, v.load(more, i)))
                    gb = v.add(v.multiply(of_one, gb), v.multiply(of_other, v.load(more, j)))
                a = v.add(v.multiply(decays, v.load(values, i)), ga)
                b = v.add(v.multiply(decays, v.load(values, j)), gb)
                high = v.top_of(v.larger(v.magnitudes(a), v.magnitudes(b)))
                if high >= limit:
                    high = _fold_slowly(values, gradient, i, i + GRANULE, decay, report, kept, more, factors)
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
        top = _fold_slowly(values, gradient, whole, n, decay, report, kept, more, factors)
        report[2] += squares_of(values, whole, n)
        last = whole // block
        maxima[last] = top if whole % block == 0 else max(maxima[last], top)


@kernel
def _momentum_slowly(  # type: ignore[no-untyped-def]
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
                    high = _momentum_slowly(values, velocity, gradient, i, i + GRANULE, factors, report, kept)
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
        top = _momentum_slowly(values, velocity, gradient, whole, n, factors, report, kept)
        report[2] += squares_of(values, whole, n)
        last = whole // block
        maxima[last] = top if whole % block == 0 else max(maxima[last], top)


class Pair(NamedTuple):
    """A piece of a gradient that is a sum: factors[0] * one + factors[1] * other.

    Attributes:
        one, other: shape (m,), in a form the kernels know; they stay as they are.
        factors: shape (2,), of the type of values.
    """

    one: Array
    other: Array
    factors: Array


class Folded(NamedTuple):
    """What a fold learned.

    Attributes:
        num_nonfinite: elements that were taken as 0.
        first_nonfinite: position of the first, -1 if there is none.
        square_norm: sum of squares of the new values.
    """

    num_nonfinite: int
    first_nonfinite: int
    square_norm: float


def fold_factors(dtype: Any, decay: float, momentum: float, nesterov: bool) -> Array:
    """The four factors of a fold: decay, momentum, and what gradient and velocity add to the values.

    Args:
        dtype: of the values.
        decay: factor of the old values.
        momentum: factor of the old velocity.
        nesterov: add gradient + momentum * velocity, not the velocity.

    Returns:
        shape (4,).
    """
    return np.array([decay, momentum, *((1.0, momentum) if nesterov else (0.0, 1.0))], dtype)


def fold(
    values: Array,
    pieces: Iterable[tuple[int, Array | Pair]],
    maxima: Array,
    layout: Layout,
    factors: Array,
    velocity: Array | None = None,
    *,
    keep_gradient: bool = False,
) -> Folded:
    """values = decay * values + gradient (or momentum's step); gradient = 0; maxima of blocks.

    Args:
        values: float32 or float64, shape (n,), finite; changed.
        pieces: start and memory of each piece of the gradient, all but the last multiples of the block
            size, in a form the kernels know (`native_bits`); changed. Pairs, where there is no velocity.
        maxima: shape (layout.num_blocks,); overwritten.
        layout: of the blocks.
        factors: of `fold_factors`; without a velocity only the decay counts.
        velocity: shape (n,), for momentum correction; changed.
        keep_gradient: leaves the pieces as they are.

    Returns:
        What was learned on the way.
    """
    count, first, square_norm = 0, -1, 0.0
    block, kept = layout.block, True if keep_gradient else None
    for start, piece in pieces:
        stop = start + (piece.one if isinstance(piece, Pair) else piece).size
        report = np.array([0.0, -1.0, 0.0])
        tops = maxima[start // block : -(-stop // block)]
        if isinstance(piece, Pair):
            one, other, both = piece
            fold_plain(values[start:stop], one, tops, block, factors[0], report, True, other, both)
        elif velocity is None:
            fold_plain(values[start:stop], piece, tops, block, factors[0], report, kept)
        else:
            fold_momentum(values[start:stop], velocity[start:stop], piece, tops, block, factors, report, kept)
        if first < 0 <= report[1]:
            first = start + int(report[1])
        count += int(report[0])
        square_norm += float(report[2])
    return Folded(count, first, square_norm)
