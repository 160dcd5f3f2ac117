"""What threshold estimators ask of an accumulator: counts and moments of magnitudes, one read each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.lanes import count_bits, magnitude, mask_at_least

# A product of so many fractions below 2 stays below 2**64; then its exponent is taken out.
_STRETCH = 64 * v.LANES
_SMALLEST_NORMAL_32 = float(np.finfo(np.float32).tiny)
_SMALLEST_NORMAL_64 = float(np.finfo(np.float64).tiny)


def _float_type(bits: Any) -> Any:
    return types.float64 if bits.bitwidth == 64 else types.float32


def _as_floats(builder: Any, words: Any) -> Any:
    float_type = ir.DoubleType() if words.type.element.width == 64 else ir.FloatType()
    return builder.bitcast(words, ir.VectorType(float_type, v.LANES))


def _shape(words: Any) -> tuple[int, int]:
    """Bits of the fraction, and the exponent field of 1.0."""
    return (52, 1023) if words.type.element.width == 64 else (23, 127)


@v.alike
def or_zero(builder: Any, lanes: Any, threshold: Any) -> Any:
    """The unsigned lanes that are >= threshold, 0 for the others."""
    hits = builder.icmp_unsigned(">=", lanes, threshold)
    return builder.select(hits, lanes, ir.Constant(lanes.type, None))


@v.emitting(lambda lanes: v.Lanes(_float_type(lanes.element))(lanes))
def as_floats(builder: Any, lanes: Any) -> Any:
    return _as_floats(builder, lanes)


@v.alike
def exponents_of(builder: Any, lanes: Any) -> Any:
    """The exponent fields of magnitude bits (127 or 1023 for 1.0, 0 for 0)."""
    places, _ = _shape(lanes)
    return builder.lshr(lanes, v.spread(ir.Constant(lanes.type.element, places)))


@v.emitting(lambda lanes: v.Lanes(_float_type(lanes.element))(lanes))
def fractions_of(builder: Any, lanes: Any) -> Any:
    """1.fraction of magnitude bits, as floats in [1, 2); 1 for 0."""
    (places, one), word = _shape(lanes), lanes.type.element
    fraction = builder.and_(lanes, v.spread(ir.Constant(word, (1 << places) - 1)))
    return _as_floats(builder, builder.or_(fraction, v.spread(ir.Constant(word, one << places))))


@v.alike
def add_words(builder: Any, left: Any, right: Any) -> Any:
    return builder.add(left, right)


@v.emitting(lambda lanes: types.int64(lanes))
def total_of(builder: Any, lanes: Any) -> Any:
    """Sum over unsigned lanes, as int64."""
    long = ir.VectorType(ir.IntType(64), v.LANES)
    vector = builder.zext(lanes, long) if lanes.type.element.width < 64 else lanes
    return v.called(builder, f"llvm.vector.reduce.add.v{v.LANES}i64", [vector], ir.IntType(64))


@kernel
def count_at_least(values, maxima, block, thresholds, counts):  # type: ignore[no-untyped-def]
    """counts[t] = how many magnitudes are >= thresholds[t]."""
    counts[:] = 0
    if thresholds.size == 0:
        return
    lowest = thresholds.min()
    for j in range(maxima.size):
        if maxima[j] < lowest:
            continue
        i, stop = j * block, min(j * block + block, values.size)
        while i + v.LANES <= stop:
            sizes = v.magnitudes(v.load(values, i))
            for t in range(thresholds.size):
                counts[t] += count_bits(mask_at_least(sizes, v.splat(thresholds[t])))
            i += v.LANES
        while i < stop:
            for t in range(thresholds.size):
                counts[t] += magnitude(values[i]) >= thresholds[t]
            i += 1


@kernel
def _one_by_one(values, threshold, start, stop, out):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        if magnitude(values[i]) >= threshold:
            size = abs(np.float64(values[i]))
            out[0] += 1
            out[1] += size
            out[2] += size * size
            out[3] += math.log(size)


@kernel
def moments_at_least(values, threshold, out):  # type: ignore[no-untyped-def]
    """Number, sum, sum of squares and of logarithms of magnitudes >= threshold; few logarithms are taken."""
    out[:] = 0.0
    thresholds = v.splat(threshold)
    rest = np.empty(v.LANES, values.dtype)
    rest[0] = _SMALLEST_NORMAL_32 if values.itemsize == 4 else _SMALLEST_NORMAL_64
    normals = v.splat(max(threshold, magnitude(rest[0])))
    bias = 127 if values.itemsize == 4 else 1023
    whole = values.size // _STRETCH * _STRETCH
    exponents = 0
    if values.size == 0:
        return
    products = fractions_of(v.zeros_like(thresholds))
    for stretch in range(0, whole, _STRETCH):
        sums = v.zeros_like(products)
        squares = v.zeros_like(products)
        words = v.zeros_like(thresholds)
        count = num_normal = 0
        before = products
        for i in range(stretch, stretch + _STRETCH, v.LANES):
            sizes = v.magnitudes(v.load(values, i))
            count += count_bits(mask_at_least(sizes, thresholds))
            kept = or_zero(sizes, normals)
            num_normal += count_bits(mask_at_least(kept, normals))
            numbers = as_floats(kept)
            sums = v.add(sums, numbers)
            squares = v.add(squares, v.multiply(numbers, numbers))
            words = add_words(words, exponents_of(kept))
            products = v.multiply(products, fractions_of(kept))
        if count == 0:
            continue
        total = v.sum_of(squares)
        # Beyond what squares or sums hold, or subnormal numbers, which have no 1 before their fraction:
        # the slow way.
        if num_normal < count or not 1e-30 < total < math.inf:
            products = before
            _one_by_one(values, threshold, stretch, stretch + _STRETCH, out)
            continue
        # From here products hold [1, 2) again: their exponents move to the sum of exponents.
        grown = v.magnitudes(products)
        exponents += total_of(exponents_of(grown)) - v.LANES * bias
        products = fractions_of(grown)
        exponents += total_of(words) - count * bias
        out[0] += count
        out[1] += v.sum_of(sums)
        out[2] += total
    v.store(rest, 0, products)
    for lane in range(v.LANES):
        out[3] += math.log(rest[lane])
    out[3] += exponents * math.log(2.0)
    _one_by_one(values, threshold, whole, values.size, out)
