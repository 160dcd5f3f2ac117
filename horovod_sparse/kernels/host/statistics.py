"""What threshold estimators ask of an accumulator: counts and moments of magnitudes, one read each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.lanes import count_bits, magnitude, mask_at_least

# A product of so many fractions below 2 stays below 2**64; then its exponent is taken out.
_STRETCH = 64 * v.LANES
_SMALLEST_NORMAL_32 = float(np.finfo(np.float32).tiny)
_SMALLEST_NORMAL_64 = float(np.finfo(np.float64).tiny)


def _float_type(bits: Any) -> Any:
    return types.float64 if bits.bitwidth == 64 else types.float32


def _shape(bits: Any) -> tuple[int, int]:
    """Bits of the fraction, and the exponent field of 1.0."""
    return (52, 1023) if bits.bitwidth == 64 else (23, 127)


@intrinsic
def or_zero(typingctx: Any, lanes: Any, threshold: Any) -> Any:
    """The unsigned lanes that are >= threshold, 0 for the others."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        hits = builder.icmp_unsigned(">=", args[0], args[1])
        return builder.select(hits, args[0], ir.Constant(args[0].type, None))

    return lanes(lanes, lanes), codegen


@intrinsic
def as_floats(typingctx: Any, lanes: Any) -> Any:
    """Unsigned lanes read as floats."""
    result = v.Lanes(_float_type(lanes.element))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(result))

    return result(lanes), codegen


@intrinsic
def exponents_of(typingctx: Any, lanes: Any) -> Any:
    """The exponent fields of magnitude bits (127 or 1023 for 1.0, 0 for 0)."""
    places, _ = _shape(lanes.element)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(lanes.element.bitwidth)
        return builder.lshr(args[0], v.spread(ir.Constant(word, places)))

    return lanes(lanes), codegen


@intrinsic
def fractions_of(typingctx: Any, lanes: Any) -> Any:
    """1.fraction of magnitude bits, as floats in [1, 2); 1 for 0."""
    places, one = _shape(lanes.element)
    result = v.Lanes(_float_type(lanes.element))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(lanes.element.bitwidth)
        fraction = builder.and_(args[0], v.spread(ir.Constant(word, (1 << places) - 1)))
        with_one = builder.or_(fraction, v.spread(ir.Constant(word, one << places)))
        return builder.bitcast(with_one, context.get_value_type(result))

    return result(lanes), codegen


@intrinsic
def add_words(typingctx: Any, left: Any, right: Any) -> Any:
    """Sum of integer lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.add(args[0], args[1])

    return left(left, left), codegen


@intrinsic
def total_of(typingctx: Any, lanes: Any) -> Any:
    """Sum over unsigned lanes, as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        long = ir.VectorType(ir.IntType(64), v.LANES)
        vector = builder.zext(args[0], long) if lanes.element.bitwidth < 64 else args[0]
        kind = ir.FunctionType(ir.IntType(64), [long])
        name = f"llvm.vector.reduce.add.v{v.LANES}i64"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(function, [vector])

    return types.int64(lanes), codegen


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
    """Adds up the magnitudes >= threshold: their number, sum, sum of squares, and sum of logarithms.

    The logarithm of a product costs one logarithm: fractions are multiplied and exponents added, 64
    at a time in each lane.
    """
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
