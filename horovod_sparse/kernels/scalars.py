"""Single elements inside a kernel: reading half types, magnitude bits and back."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from horovod_sparse.kernels.lanes import widen_half

__all__ = ["as_key", "digit", "infinity", "magnitude", "raw_bits", "read", "successor"]


@intrinsic
def read(typingctx: Any, array: Any, index: Any) -> Any:
    """array[index] without wraparound; half types (see lanes.py) arrive as float32."""
    half = array.dtype in (types.int16, types.uint16)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(context.make_array(array)(context, builder, args[0]).data, [args[1]])
        value = builder.load(pointer)
        return widen_half(builder, value, array.dtype, 0) if half else value

    return (types.float32 if half else array.dtype)(array, types.intp), codegen


def _unsigned(number: Any) -> Any:
    return types.uint64 if number.bitwidth == 64 else types.uint32


@intrinsic
def raw_bits(typingctx: Any, number: Any) -> Any:
    """The bits of a float as an unsigned integer."""
    bits = _unsigned(number)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(bits.bitwidth))

    return bits(number), codegen


@intrinsic
def magnitude(typingctx: Any, number: Any) -> Any:
    """The bits of a float without its sign."""
    bits = _unsigned(number)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(bits.bitwidth)
        return builder.and_(builder.bitcast(args[0], word), ir.Constant(word, (1 << (bits.bitwidth - 1)) - 1))

    return bits(number), codegen


@intrinsic
def infinity(typingctx: Any, bits: Any) -> Any:
    """The magnitude bits of Inf, in the type of the argument (uint32 or uint64)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = 0x7FF0000000000000 if bits.bitwidth == 64 else 0x7F800000
        return ir.Constant(ir.IntType(bits.bitwidth), value)

    return bits(bits), codegen


@intrinsic
def digit(typingctx: Any, bits: Any, shift: Any, mask: Any) -> Any:
    """(bits >> shift) & mask as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        value = builder.zext(args[0], word) if bits.bitwidth < 64 else args[0]
        return builder.and_(builder.lshr(value, args[1]), args[2])

    return types.int64(bits, types.int64, types.int64), codegen


@intrinsic
def as_key(typingctx: Any, like: Any, number: Any) -> Any:
    """An integer in the unsigned type of `like`: numba would widen, or go through float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(like.bitwidth)
        return builder.trunc(args[1], word) if like.bitwidth < 64 else args[1]

    return like(like, types.int64), codegen


@intrinsic
def successor(typingctx: Any, bits: Any) -> Any:
    """bits + 1 in the same type."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.add(args[0], ir.Constant(ir.IntType(bits.bitwidth), 1))

    return bits(bits), codegen
