"""Explicit vectors of sixteen numbers for numba, with operations on vectors, masks and single numbers.

Left to itself LLVM does not vectorize a loop that adds, stores, clears and takes block maxima at the
same time, so the kernels say what they mean: `Lanes` is an LLVM vector of 16 elements, which becomes
one AVX-512 register, two of AVX2 or four of NEON, whatever the machine has.

Half types have no arithmetic of their own here. They are passed as what holds their bits, int16 for
float16 and uint16 for bfloat16, and become float32 when they are loaded. Which lanes pass is one bit
per lane in a uint64, bit 0 for lane 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, models, register_model

LANES = 16


class Lanes(types.Type):
    """The numba type of a vector of `LANES` elements."""

    def __init__(self, element: Any) -> None:
        self.element = element
        super().__init__(name=f"Lanes({element})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        element = manager.lookup(lanes.element).get_value_type()
        super().__init__(manager, lanes, ir.VectorType(element, LANES))


def constant(scalar: Any, count: int = LANES) -> Any:
    """Returns an LLVM constant as a vector of `count` equal lanes, or with count 0 unchanged."""
    return ir.Constant(ir.VectorType(scalar.type, count), [scalar.constant] * count) if count else scalar


def widen_half(builder: Any, raw: Any, kind: Any, count: int = LANES) -> Any:
    """Emits the exact conversion of float16 (kind int16) or bfloat16 (kind uint16) bits to float32.

    By integer arithmetic, because not every machine has an instruction for it and the routines LLVM
    would call instead are not there in a compiled kernel.
    """

    def word(value: int) -> Any:
        return constant(ir.Constant(ir.IntType(32), value), count)

    def shaped(scalar: Any) -> Any:
        return ir.VectorType(scalar, count) if count else scalar

    bits = builder.zext(raw, shaped(ir.IntType(32)))
    if kind == types.uint16:
        return builder.bitcast(builder.shl(bits, word(16)), shaped(ir.FloatType()))
    size = builder.and_(bits, word(0x7FFF))
    moved = builder.shl(size, word(13))
    normal = builder.add(moved, word(112 << 23))
    # A subnormal half is its fraction times 2**-24: put the fraction below 2**-14, take 2**-14 off again.
    tiny = builder.bitcast(builder.add(moved, word(113 << 23)), shaped(ir.FloatType()))
    offset = constant(ir.Constant(ir.FloatType(), 2.0**-14), count)
    subnormal = builder.bitcast(builder.fsub(tiny, offset), shaped(ir.IntType(32)))
    special = builder.or_(moved, word(0x7F800000))
    finite = builder.select(builder.icmp_unsigned("<", size, word(0x0400)), subnormal, normal)
    result = builder.select(builder.icmp_unsigned("<", size, word(0x7C00)), finite, special)
    sign = builder.shl(builder.and_(bits, word(0x8000)), word(16))
    return builder.bitcast(builder.or_(result, sign), shaped(ir.FloatType()))


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    pointer = builder.gep(context.make_array(array_type)(context, builder, array).data, [index])
    element = context.get_data_type(array_type.dtype)
    return builder.bitcast(pointer, ir.VectorType(element, LANES).as_pointer())


def _bits_type(number: Any) -> Any:
    if isinstance(number, Lanes):
        return Lanes(_bits_type(number.element))
    return types.uint64 if number.bitwidth == 64 else types.uint32


@intrinsic
def load(typingctx: Any, array: Any, index: Any) -> Any:
    """Loads `LANES` elements from index on; half types are converted to float32."""
    half = array.dtype in (types.int16, types.uint16)
    result = Lanes(types.float32 if half else array.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, array, args[0], args[1])
        value = builder.load(pointer, align=array.dtype.bitwidth // 8)
        return widen_half(builder, value, array.dtype) if half else value

    return result(array, types.intp), codegen


@intrinsic
def store(typingctx: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Writes the lanes to the array, from index on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, array, args[0], args[1])
        builder.store(args[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), codegen


@intrinsic
def stream(typingctx: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Writes the lanes to the array past the caches, from index on, where a cache line begins."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        written = builder.store(args[2], _address(context, builder, array, args[0], args[1]), align=64)
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        written.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), codegen


def emitting(typed: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function that emits LLVM code for values, as a numba intrinsic whose types `typed` gives.

    `typed` gives the signature, from numba's types of the arguments.
    """

    def make_intrinsic(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)
        def typing(_context: Any, *kinds: Any) -> Any:
            def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                return emit(builder, *args)

            return typed(*kinds), codegen

        return intrinsic(typing)

    return make_intrinsic


#: decorates a function of one argument, or two of one type, whose result has that type, too
alike = emitting(lambda *lanes: lanes[0](*lanes))


def broadcast(builder: Any, scalar: Any) -> Any:
    """Emits a vector with the value in every lane."""
    vector = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def bits_of_float(builder: Any, value: Any) -> Any:
    """Emits a bitcast of a float (or vector of floats) to integers; integers stay as they are."""
    lanes = isinstance(value.type, ir.VectorType)
    kind = value.type.element if lanes else value.type
    if isinstance(kind, ir.IntType):
        return value
    word = ir.IntType(64 if isinstance(kind, ir.DoubleType) else 32)
    return builder.bitcast(value, ir.VectorType(word, LANES) if lanes else word)


def magnitude_of_float(builder: Any, value: Any) -> Any:
    """Emits a float's bits with the sign bit cleared."""
    bits = bits_of_float(builder, value)
    lanes = isinstance(bits.type, ir.VectorType)
    word = bits.type.element if lanes else bits.type
    return builder.and_(bits, constant(ir.Constant(word, (1 << (word.width - 1)) - 1), LANES if lanes else 0))


def call_llvm(builder: Any, name: str, args: list[Any], result: Any = None, **options: Any) -> Any:
    """Emits a call of an LLVM intrinsic; its result has the first argument's type by default."""
    kind = ir.FunctionType(args[0].type if result is None else result, [one.type for one in args])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, args, **options)


@emitting(lambda scalar: Lanes(scalar)(scalar))
def splat(builder: Any, scalar: Any) -> Any:
    """Returns a vector with the scalar in every lane."""
    return broadcast(builder, scalar)


@alike
def zeros_like(builder: Any, lanes: Any) -> Any:
    """Returns a vector of zeros of the same type."""
    return ir.Constant(lanes.type, None)


@alike
def add(builder: Any, left: Any, right: Any) -> Any:
    """Returns left + right, of floats (lane by lane)."""
    return builder.fadd(left, right)


@alike
def multiply(builder: Any, left: Any, right: Any) -> Any:
    """Returns left * right, of floats (lane by lane)."""
    return builder.fmul(left, right)


@alike
def divide(builder: Any, left: Any, right: Any) -> Any:
    """Returns left / right, of floats (lane by lane)."""
    return builder.fdiv(left, right)


@alike
def lane_maximum(builder: Any, left: Any, right: Any) -> Any:
    """Returns the maximum of two vectors, lane by lane, as unsigned integers."""
    return builder.select(builder.icmp_unsigned(">", left, right), left, right)


@alike
def square_root(builder: Any, lanes: Any) -> Any:
    """Returns the square roots, correctly rounded."""
    width = 64 if isinstance(lanes.type.element, ir.DoubleType) else 32
    return call_llvm(builder, f"llvm.sqrt.v{LANES}f{width}", [lanes])


@emitting(lambda lanes: lanes.element(lanes))
def largest_lane(builder: Any, lanes: Any) -> Any:
    """Returns the largest of a vector's lanes, as unsigned integers."""
    element = lanes.type.element
    return call_llvm(builder, f"llvm.vector.reduce.umax.v{LANES}i{element.width}", [lanes], element)


@emitting(types.float64)
def lane_sum(builder: Any, lanes: Any) -> Any:
    """Returns the sum of a vector's lanes, as float64."""
    double, vector = ir.DoubleType(), lanes
    if not isinstance(lanes.type.element, ir.DoubleType):
        vector = builder.fpext(lanes, ir.VectorType(double, LANES))
    given, name = [ir.Constant(double, 0.0), vector], f"llvm.vector.reduce.fadd.v{LANES}f64"
    return call_llvm(builder, name, given, double, fastmath=("reassoc",))


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Prefetches the cache line of array[index], which will be read or written soon."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(context.make_array(array)(context, builder, args[0]).data, [args[1]])
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        options = [ir.Constant(word, value) for value in (0, 3, 1)]
        builder.call(function, [builder.bitcast(pointer, byte), *options])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def read(typingctx: Any, array: Any, index: Any) -> Any:
    """Returns array[index]; negative indices do not wrap, and half types are converted to float32."""
    half = array.dtype in (types.int16, types.uint16)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(context.make_array(array)(context, builder, args[0]).data, [args[1]])
        value = builder.load(pointer)
        return widen_half(builder, value, array.dtype, 0) if half else value

    return (types.float32 if half else array.dtype)(array, types.intp), codegen


@emitting(lambda number: _bits_type(number)(number))
def raw_bits(builder: Any, number: Any) -> Any:
    """Returns the bits of a float (or vector of floats) as unsigned integers."""
    return bits_of_float(builder, number)


@emitting(lambda number: _bits_type(number)(number))
def magnitude(builder: Any, number: Any) -> Any:
    """Returns a float's bits without the sign: integers that order like magnitudes, NaN on top."""
    return magnitude_of_float(builder, number)


@alike
def infinity(builder: Any, bits: Any) -> Any:
    """Returns the bits of infinity in the type of `bits` (uint32 or uint64)."""
    return ir.Constant(bits.type, 0x7FF0000000000000 if bits.type.width == 64 else 0x7F800000)


@emitting(lambda bits, shift, mask: types.int64(bits, types.int64, types.int64))
def digit(builder: Any, bits: Any, shift: Any, mask: Any) -> Any:
    """Returns (bits >> shift) & mask as int64: a digit of a radix select."""
    value = builder.zext(bits, ir.IntType(64)) if bits.type.width < 64 else bits
    return builder.and_(builder.lshr(value, shift), mask)


@emitting(lambda like, number: like(like, types.int64))
def as_key(builder: Any, like: Any, number: Any) -> Any:
    """Converts an integer to the unsigned type of `like`: numba would widen, or go through float64."""
    return builder.trunc(number, like.type) if like.type.width < 64 else number


@alike
def successor(builder: Any, bits: Any) -> Any:
    """Returns bits + 1 in the same type."""
    return builder.add(bits, ir.Constant(bits.type, 1))


@emitting(lambda lanes, threshold: types.uint64(lanes, lanes))
def mask_at_least(builder: Any, lanes: Any, threshold: Any) -> Any:
    """Returns a mask with one bit per lane, set where the lane is >= the threshold's (unsigned)."""
    hits = builder.icmp_unsigned(">=", lanes, threshold)
    return builder.zext(builder.bitcast(hits, ir.IntType(LANES)), ir.IntType(64))


@emitting(lambda lanes, lane: lanes.element(lanes, types.int64))
def lane_of(builder: Any, lanes: Any, lane: Any) -> Any:
    """Returns the lane with this number."""
    return builder.extract_element(lanes, lane)


@emitting(lambda mask: types.int64(mask))
def first_bit(builder: Any, mask: Any) -> Any:
    """Returns the position of the lowest set bit of a uint64 that is not 0."""
    return builder.cttz(mask, ir.Constant(ir.IntType(1), 1))


@emitting(lambda mask: types.uint64(types.uint64))
def without_first_bit(builder: Any, mask: Any) -> Any:
    """Returns the mask with its lowest set bit cleared."""
    return builder.and_(mask, builder.sub(mask, ir.Constant(ir.IntType(64), 1)))


@emitting(lambda mask, marks: types.uint64(types.uint64, types.uint64))
def without_last_bit(builder: Any, mask: Any, marks: Any) -> Any:
    """Returns the mask without the bit at the position of the highest set bit of `marks` (not 0)."""
    behind = builder.ctlz(marks, ir.Constant(ir.IntType(1), 1))
    highest = builder.lshr(ir.Constant(ir.IntType(64), 1 << 63), behind)
    return builder.and_(mask, builder.not_(highest))


@emitting(lambda mask: types.int64(mask))
def count_bits(builder: Any, mask: Any) -> Any:
    """Returns the number of set bits of a uint64."""
    return builder.ctpop(mask)
