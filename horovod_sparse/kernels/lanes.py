"""Sixteen numbers at once: explicit vectors for numba; which lanes pass; and the same for single numbers.

Left to itself LLVM does not vectorize a loop that adds, stores, clears and takes block maxima at the
same time, so the kernels say what they mean: `Lanes` is an LLVM vector of 16 elements, which becomes
one AVX-512 register, two of AVX2 or four of NEON, whatever the machine has.

Half types have no arithmetic of their own here. They are passed as what holds their bits, int16 for
float16 and uint16 for bfloat16, and become float32 when they are loaded. Which lanes pass is one bit
per lane in a uint64, bit 0 for lane 0.
"""

from __future__ import annotations

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


def spread(scalar: Any, count: int = LANES) -> Any:
    """The LLVM constant vector (or, with count 0, scalar) of one constant."""
    return ir.Constant(ir.VectorType(scalar.type, count), [scalar.constant] * count) if count else scalar


def widen_half(builder: Any, raw: Any, kind: Any, count: int = LANES) -> Any:
    """Emits float16 (kind int16) or bfloat16 (kind uint16) bits -> float32; exact.

    By integer arithmetic, because not every machine has an instruction for it and the routines LLVM
    would call instead are not there in a compiled kernel.
    """

    def word(value: int) -> Any:
        return spread(ir.Constant(ir.IntType(32), value), count)

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
    offset = spread(ir.Constant(ir.FloatType(), 2.0**-14), count)
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


def _bits_type(element: Any) -> Any:
    return types.uint64 if element.bitwidth == 64 else types.uint32


@intrinsic
def load(typingctx: Any, array: Any, index: Any) -> Any:
    """The `LANES` elements from index on; half types arrive as float32."""
    half = array.dtype in (types.int16, types.uint16)
    result = Lanes(types.float32 if half else array.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, array, args[0], args[1])
        value = builder.load(pointer, align=array.dtype.bitwidth // 8)
        return widen_half(builder, value, array.dtype) if half else value

    return result(array, types.intp), codegen


@intrinsic
def store(typingctx: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Writes the lanes from index on; into a half type only zeros may be written."""
    same = lanes.element == array.dtype

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, array, args[0], args[1])
        zeros = ir.Constant(ir.VectorType(context.get_data_type(array.dtype), LANES), None)
        builder.store(args[2] if same else zeros, pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), codegen


@intrinsic
def splat(typingctx: Any, scalar: Any) -> Any:
    """The scalar in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        undefined = ir.Constant(ir.VectorType(args[0].type, LANES), ir.Undefined)
        one = builder.insert_element(undefined, args[0], ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
        return builder.shuffle_vector(one, undefined, zeros)

    return Lanes(scalar)(scalar), codegen


@intrinsic
def zeros_like(typingctx: Any, lanes: Any) -> Any:
    """Zero in every lane, of the same type."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(args[0].type, None)

    return lanes(lanes), codegen


def _binary(emit: Any) -> Any:
    def typing(typingctx: Any, left: Any, right: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, *args)

        return left(left, left), codegen

    return typing


def _emit_larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", left, right), left, right)


add = intrinsic(_binary(lambda builder, left, right: builder.fadd(left, right)))
multiply = intrinsic(_binary(lambda builder, left, right: builder.fmul(left, right)))
divide = intrinsic(_binary(lambda builder, left, right: builder.fdiv(left, right)))
larger = intrinsic(_binary(_emit_larger))


@intrinsic
def root(typingctx: Any, lanes: Any) -> Any:
    """Square roots, rounded as IEEE says."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, name = args[0].type, f"llvm.sqrt.v{LANES}f{lanes.element.bitwidth}"
        declared = ir.FunctionType(kind, [kind])
        function = builder.module.globals.get(name) or ir.Function(builder.module, declared, name)
        return builder.call(function, args)

    return lanes(lanes), codegen


@intrinsic
def magnitudes(typingctx: Any, lanes: Any) -> Any:
    """The bits without the sign, unsigned: they order like the magnitudes, Inf and NaN on top."""
    bits = _bits_type(lanes.element)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(bits.bitwidth)
        value = builder.bitcast(args[0], ir.VectorType(word, LANES))
        return builder.and_(value, spread(ir.Constant(word, (1 << (bits.bitwidth - 1)) - 1)))

    return Lanes(bits)(lanes), codegen


def _reduce(builder: Any, name: str, vector: Any, *start: Any) -> Any:
    element = vector.type.element
    letter = {"float": "f32", "double": "f64"}.get(str(element), str(element))
    kind = ir.FunctionType(element, [value.type for value in (*start, vector)])
    full_name = f"llvm.vector.reduce.{name}.v{LANES}{letter}"
    function = builder.module.globals.get(full_name) or ir.Function(builder.module, kind, full_name)
    return builder.call(function, [*start, vector], fastmath=("reassoc",) if start else ())


@intrinsic
def top_of(typingctx: Any, lanes: Any) -> Any:
    """The largest of unsigned lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _reduce(builder, "umax", args[0])

    return lanes.element(lanes), codegen


@intrinsic
def sum_of(typingctx: Any, lanes: Any) -> Any:
    """The sum of float lanes, as float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        double, vector = ir.DoubleType(), args[0]
        if lanes.element == types.float32:
            vector = builder.fpext(vector, ir.VectorType(double, LANES))
        return _reduce(builder, "fadd", vector, ir.Constant(double, 0.0))

    return types.float64(lanes), codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Asks for the cache line of array[index], which will be read (and perhaps written) soon."""

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
    """array[index] without wraparound; half types arrive as float32."""
    half = array.dtype in (types.int16, types.uint16)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(context.make_array(array)(context, builder, args[0]).data, [args[1]])
        value = builder.load(pointer)
        return widen_half(builder, value, array.dtype, 0) if half else value

    return (types.float32 if half else array.dtype)(array, types.intp), codegen


@intrinsic
def clear(typingctx: Any, array: Any, index: Any) -> Any:
    """array[index] = 0; compiled for memory that is only read, too, where it is never reached."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(context.make_array(array)(context, builder, args[0]).data, [args[1]])
        builder.store(ir.Constant(context.get_data_type(array.dtype), 0), pointer)
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def raw_bits(typingctx: Any, number: Any) -> Any:
    """The bits of a float as an unsigned integer."""
    bits = _bits_type(number)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(bits.bitwidth))

    return bits(number), codegen


@intrinsic
def magnitude(typingctx: Any, number: Any) -> Any:
    """The bits of a float without its sign."""
    bits = _bits_type(number)

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


@intrinsic
def mask_at_least(typingctx: Any, lanes: Any, threshold: Any) -> Any:
    """One bit per unsigned lane that is >= the lane of threshold."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        hits = builder.icmp_unsigned(">=", args[0], args[1])
        return builder.zext(builder.bitcast(hits, ir.IntType(LANES)), ir.IntType(64))

    return types.uint64(lanes, lanes), codegen


@intrinsic
def lane_of(typingctx: Any, lanes: Any, lane: Any) -> Any:
    """One lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], args[1])

    return lanes.element(lanes, types.int64), codegen


@intrinsic
def first_bit(typingctx: Any, mask: Any) -> Any:
    """Position of the lowest bit set in a uint64 that is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(mask), codegen


@intrinsic
def without_first_bit(typingctx: Any, mask: Any) -> Any:
    """The mask with its lowest bit cleared."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.and_(args[0], builder.sub(args[0], ir.Constant(ir.IntType(64), 1)))

    return types.uint64(types.uint64), codegen


@intrinsic
def without_last_bit(typingctx: Any, mask: Any, marks: Any) -> Any:
    """The mask without its bit at the place of the highest bit set in marks (which is not 0)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        behind = builder.ctlz(args[1], ir.Constant(ir.IntType(1), 1))
        highest = builder.lshr(ir.Constant(word, 1 << 63), behind)
        return builder.and_(args[0], builder.not_(highest))

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def count_bits(typingctx: Any, mask: Any) -> Any:
    """How many bits of a uint64 are set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(mask), codegen
