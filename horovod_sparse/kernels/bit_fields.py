"""Taking floats apart, sixteen at a time: exponents and fractions, for sums of logarithms."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from horovod_sparse.kernels.lanes import LANES, Lanes, spread

__all__ = ["add_words", "as_floats", "exponents_of", "fractions_of", "or_zero", "total_of"]


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
    result = Lanes(_float_type(lanes.element))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(result))

    return result(lanes), codegen


@intrinsic
def exponents_of(typingctx: Any, lanes: Any) -> Any:
    """The exponent fields of magnitude bits (127 or 1023 for 1.0, 0 for 0)."""
    places, _ = _shape(lanes.element)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(lanes.element.bitwidth)
        return builder.lshr(args[0], spread(ir.Constant(word, places)))

    return lanes(lanes), codegen


@intrinsic
def fractions_of(typingctx: Any, lanes: Any) -> Any:
    """1.fraction of magnitude bits, as floats in [1, 2); 1 for 0."""
    places, one = _shape(lanes.element)
    result = Lanes(_float_type(lanes.element))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(lanes.element.bitwidth)
        fraction = builder.and_(args[0], spread(ir.Constant(word, (1 << places) - 1)))
        with_one = builder.or_(fraction, spread(ir.Constant(word, one << places)))
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
        long = ir.VectorType(ir.IntType(64), LANES)
        vector = builder.zext(args[0], long) if lanes.element.bitwidth < 64 else args[0]
        kind = ir.FunctionType(ir.IntType(64), [long])
        name = f"llvm.vector.reduce.add.v{LANES}i64"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(function, [vector])

    return types.int64(lanes), codegen
