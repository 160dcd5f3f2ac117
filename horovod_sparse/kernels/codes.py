"""Float lanes into bits and back, for quantizers: signs, levels, bits of a plane, random numbers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from horovod_sparse.kernels.lanes import LANES, Lanes, spread
from horovod_sparse.kernels.quantization import COUNTER, FIRST, SECOND

_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)


def _of(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(_INTS, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_INTS, None))


@intrinsic
def unsigned(typingctx: Any, lanes: Any) -> Any:
    """The magnitudes of float lanes, as floats."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(lanes.element.bitwidth)
        bits = builder.bitcast(args[0], ir.VectorType(word, LANES))
        size = builder.and_(bits, spread(ir.Constant(word, (1 << (lanes.element.bitwidth - 1)) - 1)))
        return builder.bitcast(size, args[0].type)

    return lanes(lanes), codegen


@intrinsic
def doubled(typingctx: Any, lanes: Any) -> Any:
    """Float lanes as float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if lanes.element == types.float64:
            return args[0]
        return builder.fpext(args[0], ir.VectorType(ir.DoubleType(), LANES))

    return Lanes(types.float64)(lanes), codegen


@intrinsic
def minus(typingctx: Any, left: Any, right: Any) -> Any:
    """left - right."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fsub(*args)

    return left(left, left), codegen


@intrinsic
def ones(typingctx: Any, lanes: Any) -> Any:
    """1 in every float lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return spread(ir.Constant(args[0].type.element, 1.0))

    return lanes(lanes), codegen


@intrinsic
def signs(typingctx: Any, lanes: Any) -> Any:
    """One bit per float lane, set where it is below 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        below = builder.fcmp_ordered("<", args[0], ir.Constant(args[0].type, None))
        return builder.zext(builder.bitcast(below, ir.IntType(LANES)), ir.IntType(64))

    return types.uint64(lanes), codegen


@intrinsic
def chosen(typingctx: Any, bits: Any, one: Any, other: Any) -> Any:
    """`one` in the lanes whose bit is set among the lowest, `other` in the rest."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        few = builder.trunc(args[0], ir.IntType(LANES))
        mask = builder.bitcast(few, ir.VectorType(ir.IntType(1), LANES))
        return builder.select(mask, args[1], args[2])

    return one(types.uint64, one, one), codegen


@intrinsic
def drawn(typingctx: Any, like: Any, start: Any, low: Any, high: Any) -> Any:
    """`quantization.random_bits` of the positions from start on, over 2^24, as float lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def constant(number: int) -> Any:
            return spread(ir.Constant(_INT, number))

        steps = ir.Constant(_INTS, [ir.Constant(_INT, lane) for lane in range(LANES)])
        first, low_bits, high_bits = (builder.trunc(word, _INT) for word in args[1:])
        words = builder.add(_of(builder, first), steps)
        words = builder.add(builder.mul(words, constant(COUNTER)), _of(builder, low_bits))
        words = builder.xor(words, builder.lshr(words, constant(16)))
        words = builder.xor(builder.mul(words, constant(FIRST)), _of(builder, high_bits))
        words = builder.xor(words, builder.lshr(words, constant(15)))
        words = builder.lshr(builder.mul(words, constant(SECOND)), constant(8))
        floats = builder.sitofp(words, args[0].type)  # below 2^24: no sign is lost, and no bit
        return builder.fmul(floats, spread(ir.Constant(args[0].type.element, 2.0**-24)))

    return like(like, types.int64, types.int64, types.int64), codegen


@intrinsic
def floored(typingctx: Any, lanes: Any, most: Any) -> Any:
    """Whole numbers below float lanes that are 0 or more, at most `most`: int32 lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = builder.fptosi(args[0], _INTS)
        limit = _of(builder, builder.trunc(args[1], _INT))
        return builder.select(builder.icmp_signed("<", words, limit), words, limit)

    return Lanes(types.int32)(lanes, types.int64), codegen


@intrinsic
def floats_of(typingctx: Any, words: Any, like: Any) -> Any:
    """int32 lanes as floats like the others."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(args[0], args[1].type)

    return like(words, like), codegen


@intrinsic
def plane(typingctx: Any, words: Any, bit: Any) -> Any:
    """One bit per int32 lane: this one of its bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        shifted = builder.lshr(args[0], _of(builder, builder.trunc(args[1], _INT)))
        some = builder.trunc(shifted, ir.VectorType(ir.IntType(1), LANES))
        return builder.zext(builder.bitcast(some, ir.IntType(LANES)), ir.IntType(64))

    return types.uint64(words, types.int64), codegen


@intrinsic
def bits_as_float(typingctx: Any, bits: Any, like: Any) -> Any:
    """Magnitude bits as the number that they stand for."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], args[1].type)

    return like(bits, like), codegen


@intrinsic
def coarse(typingctx: Any, number: Any) -> Any:
    """A float64 with 24 significant bits: what is left of it is the same in whatever order it was summed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        bits = builder.add(builder.bitcast(args[0], word), ir.Constant(word, 1 << 28))
        return builder.bitcast(builder.and_(bits, ir.Constant(word, -(1 << 29))), ir.DoubleType())

    return types.float64(types.float64), codegen
