"""The one pass over all elements: accumulate, and leave block maxima.

Plain, with momentum correction (Lin et al. 2018), where each rank has a velocity of its own before
selection, or normalized by a second moment of its own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.host.kth import FULL, raise_bound
from horovod_sparse.kernels.lanes import as_key, infinity, magnitude, mask_at_least, raw_bits, read
from horovod_sparse.kernels.packing import append

Array = NDArray[Any]

# Elements that are checked together before anything is written; blocks are multiples of it.
GRANULE = 2 * v.LANES
# Elements whose squares are summed in the accumulator's own precision before they go to float64.
TILE = 4096
# Elements ahead of the loop whose memory is asked for: the processor's own reading ahead ends with a page.
_AHEAD = 1024


@kernel
def squares_of(values, start, stop):  # type: ignore[no-untyped-def]
    """Returns the sum of squares of values[start:stop] in float64, since float32 may overflow."""
    total = 0.0
    for i in range(start, stop):
        total += np.float64(values[i]) * np.float64(values[i])
    return total


@kernel
def _fold_slowly(  # type: ignore[no-untyped-def]
    values, velocity, moment, gradient, more, weights, start, stop, factors, report
):
    """Folds [start, stop) one by one, NaN and Inf as 0; returns the largest magnitude bits."""
    top = as_key(magnitude(values[start]), 0)
    for i in range(start, stop):
        old, step, wrong = values[i], read(gradient, i), False
        if weights is not None:
            step = weights[0] * step
        if more is not None:
            step = step + weights[1] * read(more, i)
        if velocity is not None:
            wrong = not math.isfinite(step)
            if wrong:
                step = old - old  # 0 of the same type: a literal would make all this float64
            speed = factors[1] * velocity[i] + step
            if not math.isfinite(speed):
                wrong, speed = True, factors[1] * velocity[i]
            velocity[i] = speed
            step = factors[2] * step + factors[3] * speed
        if moment is not None:
            square = factors[1] * moment[i] + factors[2] * (step * step)
            wrong = not math.isfinite(square)
            if wrong:
                step = old - old
            else:
                moment[i] = square
                step = factors[3] * step / (math.sqrt(square + factors[5]) + factors[4])
        carried = factors[0] * old
        new = carried + step
        if not math.isfinite(new):
            wrong, new = True, carried if math.isfinite(carried) else old
        if wrong:
            if report[1] < 0:
                report[1] = i
            report[0] += 1
        values[i] = new
        top = max(top, magnitude(new))
    return top


@kernel
def fold_piece(  # type: ignore[no-untyped-def]
    values, velocity, moment, gradient, more, weights, maxima, block, factors, report, noted
):
    """Folds a gradient into the residual `values` (by a velocity or moment), and stores block maxima.

    With a moment, moment = factors[1] * moment + factors[2] * gradient^2, and the step is
    factors[3] * gradient / (sqrt(moment + factors[5]) + factors[4]).

    Nothing of a granule is written before its maximum is known. Magnitude bits order like the
    magnitudes with Inf and NaN on top, so one comparison per granule finds whatever is not finite,
    and the old values are still there for the slow way. (An Inf of gradient or velocity stays one in the
    sum: 0 * Inf is NaN. A moment of Inf does not, and is looked at, too.)

    Where velocity, moment, more or weights are None, it is compiled as if the question were not there. With
    `weights` the gradient is multiplied by weights[0] first, and weights[1] * more is added where there is
    `more`. `report` is added to: how many elements were not finite, position of the first (set if it is < 0),
    sum of squares of the new values. `noted` are the arrays of `Candidates`, which get the elements that
    reach its bound.
    """
    n = values.size
    if n == 0:
        return
    decay = v.splat(factors[0])
    if velocity is not None:
        momentum, from_gradient, from_velocity = v.splat(factors[1]), v.splat(factors[2]), v.splat(factors[3])
    if moment is not None:
        lasting, fresh, rate, eps, floor = (
            v.splat(factors[1]),
            v.splat(factors[2]),
            v.splat(factors[3]),
            v.splat(factors[4]),
            v.splat(factors[5]),
        )
    if weights is not None:
        of_one, of_other = v.splat(weights[0]), v.splat(weights[1])
    limit = infinity(maxima[0])
    limits = v.splat(limit)
    bound, count, places, words = noted
    bounds, at, base, room = v.splat(bound[0]), count[0], count[1], places.size - v.LANES - block
    noting = at != FULL and room >= 0
    whole = n // GRANULE * GRANULE
    per_tile = max(TILE // block, 1) * block
    for tile in range(0, whole, per_tile):
        tile_stop = min(tile + per_tile, whole)
        squares = v.zeros_like(decay)
        tile_top = as_key(limit, 0)
        slow = False
        for start in range(tile, tile_stop, block):
            stop = min(start + block, tile_stop)
            tops = v.splat(as_key(limit, 0))
            if noting and at > room:
                at = raise_bound(bound, count[2], places, words, at)
                bounds, noting = v.splat(bound[0]), at <= room
            for i in range(start, stop, GRANULE):
                j = i + v.LANES
                for ahead in (i + _AHEAD, j + _AHEAD):
                    v.prefetch(values, ahead)
                    v.prefetch(gradient, ahead)
                    if more is not None:
                        v.prefetch(more, ahead)
                    if velocity is not None:
                        v.prefetch(velocity, ahead)
                    if moment is not None:
                        v.prefetch(moment, ahead)
                a, b = v.load(gradient, i), v.load(gradient, j)
                if weights is not None:
                    a, b = v.multiply(of_one, a), v.multiply(of_one, b)
                if more is not None:
                    a = v.add(a, v.multiply(of_other, v.load(more, i)))
                    b = v.add(b, v.multiply(of_other, v.load(more, j)))
                if velocity is not None:
                    ua = v.add(v.multiply(momentum, v.load(velocity, i)), a)
                    ub = v.add(v.multiply(momentum, v.load(velocity, j)), b)
                    a = v.add(v.multiply(from_gradient, a), v.multiply(from_velocity, ua))
                    b = v.add(v.multiply(from_gradient, b), v.multiply(from_velocity, ub))
                if moment is not None:
                    ua = v.add(v.multiply(lasting, v.load(moment, i)), v.multiply(fresh, v.multiply(a, a)))
                    ub = v.add(v.multiply(lasting, v.load(moment, j)), v.multiply(fresh, v.multiply(b, b)))
                    a = v.divide(v.multiply(rate, a), v.add(v.square_root(v.add(ua, floor)), eps))
                    b = v.divide(v.multiply(rate, b), v.add(v.square_root(v.add(ub, floor)), eps))
                a = v.add(v.multiply(decay, v.load(values, i)), a)
                b = v.add(v.multiply(decay, v.load(values, j)), b)
                high = v.lane_maximum(v.magnitude(a), v.magnitude(b))
                highest = high
                if moment is not None:
                    highest = v.lane_maximum(high, v.lane_maximum(v.magnitude(ua), v.magnitude(ub)))
                if mask_at_least(highest, limits) != 0:
                    end = i + GRANULE
                    high = v.splat(
                        _fold_slowly(
                            values, velocity, moment, gradient, more, weights, i, end, factors, report
                        )
                    )
                    a, b, slow = v.load(values, i), v.load(values, j), True
                else:
                    v.store(values, i, a)
                    v.store(values, j, b)
                    if velocity is not None:
                        v.store(velocity, i, ua)
                        v.store(velocity, j, ub)
                    if moment is not None:
                        v.store(moment, i, ua)
                        v.store(moment, j, ub)
                    squares = v.add(squares, v.add(v.multiply(a, a), v.multiply(b, b)))
                tops = v.lane_maximum(tops, high)
                if noting:  # without a branch by what is found, which would stop the reading of what comes
                    mask = mask_at_least(v.magnitude(a), bounds)
                    at = append(raw_bits(a), mask, base + i, places, words, at)
                    mask = mask_at_least(v.magnitude(b), bounds)
                    at = append(raw_bits(b), mask, base + j, places, words, at)
            top = v.largest_lane(tops)
            maxima[start // block] = top
            tile_top = max(tile_top, top)
        total = v.lane_sum(squares)
        if tile_top > as_key(limit, 0) and (slow or not 1e-30 < total < math.inf):
            total = squares_of(values, tile, tile_stop)
        report[2] += total
    if whole < n:
        top = _fold_slowly(values, velocity, moment, gradient, more, weights, whole, n, factors, report)
        report[2] += squares_of(values, whole, n)
        last = whole // block
        maxima[last] = top if whole % block == 0 else max(maxima[last], top)
        if noting and at > room:
            at = raise_bound(bound, count[2], places, words, at)
            noting = at <= room
        for i in range(whole, n if noting else whole):
            if magnitude(values[i]) >= bound[0]:
                places[at], words[at] = base + i, raw_bits(values[i])
                at += 1
    count[0] = at if noting or room < 0 else FULL


@kernel
def maximum(values, start, stop):  # type: ignore[no-untyped-def]
    """Returns the magnitude bits of the largest element of values[start:stop]."""
    tops = v.magnitude(v.splat(values[start]))
    i = start
    while i + v.LANES <= stop:
        tops = v.lane_maximum(tops, v.magnitude(v.load(values, i)))
        i += v.LANES
    top = v.largest_lane(tops)
    while i < stop:
        top = max(top, magnitude(values[i]))
        i += 1
    return top


@kernel
def scan_maxima(values, maxima, block):  # type: ignore[no-untyped-def]
    """Writes every block's maximum into `maxima`."""
    for j in range(maxima.size):
        maxima[j] = maximum(values, j * block, min(j * block + block, values.size))


@kernel
def refresh_maxima(values, maxima, block, indices):  # type: ignore[no-untyped-def]
    """Recomputes the maxima of the blocks that contain the given indices; ascending indices save work."""
    done = -1
    for index in indices:
        j = index // block
        if j != done:
            maxima[j] = maximum(values, j * block, min(j * block + block, values.size))
            done = j
