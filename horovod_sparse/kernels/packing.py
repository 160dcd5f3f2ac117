"""Appending the lanes that pass, without a branch that depends on the data.

About one lane in a hundred passes, at places nobody can predict: a loop over the hits stumbles at
every one of them. AVX-512 packs the hits of a vector in one instruction; elsewhere the loop remains.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.lanes import count_bits, first_bit, lane_of, without_first_bit


def _has_avx512() -> bool:
    """True if kernels may use AVX-512: the machine has it, and numba's settings allow it."""
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return False
    try:
        return bool(llvm.get_host_cpu_features().get("avx512f", False))
    except RuntimeError:  # a machine whose features LLVM cannot tell
        return False


PACKS = _has_avx512()


@intrinsic
def _pack_at(typingctx: Any, array: Any, index: Any, lanes: Any, mask: Any) -> Any:
    """Writes the lanes whose mask bit is set side by side, from index on; needs room for `LANES` elements."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        width = 512 // lanes.element.bitwidth
        part_type = ir.VectorType(args[2].type.element, width)
        bit_type = ir.VectorType(ir.IntType(1), width)
        name = f"llvm.x86.avx512.mask.compress.v{width}i{lanes.element.bitwidth}"
        place = args[1]
        for first in range(0, v.LANES, width):
            chosen = ir.Constant(
                ir.VectorType(ir.IntType(32), width),
                [ir.Constant(ir.IntType(32), first + lane) for lane in range(width)],
            )
            part = builder.shuffle_vector(args[2], ir.Constant(args[2].type, ir.Undefined), chosen)
            shifted = builder.lshr(args[3], ir.Constant(ir.IntType(64), first))
            some = builder.trunc(shifted, ir.IntType(width))
            given = [part, ir.Constant(part_type, None), builder.bitcast(some, bit_type)]
            packed = v.call_llvm(builder, name, given)
            pointer = builder.bitcast(builder.gep(data, [place]), part_type.as_pointer())
            builder.store(packed, pointer, align=lanes.element.bitwidth // 8)
            place = builder.add(place, builder.zext(builder.ctpop(some), ir.IntType(64)))
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes, types.uint64), codegen


@v.emitting(lambda start: v.Lanes(types.int32)(types.int64))
def _positions(builder: Any, start: Any) -> Any:
    """Returns the vector start, start + 1, ... as int32 lanes."""
    word = ir.IntType(32)
    steps = ir.Constant(ir.VectorType(word, v.LANES), [ir.Constant(word, lane) for lane in range(v.LANES)])
    return builder.add(v.broadcast(builder, builder.trunc(start, word)), steps)


if not PACKS:

    @kernel
    def _pack_at(array, index, lanes, mask):  # type: ignore[no-untyped-def]
        while mask != 0:
            array[index] = lane_of(lanes, first_bit(mask))
            mask = without_first_bit(mask)
            index += 1


@kernel
def append_positions(mask, start, indices, count):  # type: ignore[no-untyped-def]
    """Appends start + lane to `indices` for every set bit of the mask, and returns the new count."""
    _pack_at(indices, count, _positions(start), mask)
    return count + count_bits(mask)


@kernel
def append_keys(sizes, mask, keys, count):  # type: ignore[no-untyped-def]
    """Appends the lane of `sizes` to `keys` for every set bit of the mask, and returns the new count."""
    _pack_at(keys, count, sizes, mask)
    return count + count_bits(mask)


@kernel
def append(sizes, mask, start, indices, keys, count):  # type: ignore[no-untyped-def]
    """Appends the index and the key of every lane in the mask, and returns the new count."""
    _pack_at(indices, count, _positions(start), mask)
    return append_keys(sizes, mask, keys, count)
