"""Which lanes pass: one bit per lane in a uint64, bit 0 for lane 0."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from horovod_sparse.kernels.lanes import LANES

__all__ = [
    "count_bits",
    "first_bit",
    "lane_of",
    "mask_at_least",
    "without_first_bit",
    "without_last_bit",
]


@intrinsic
def mask_at_least(typingctx: Any, lanes: Any, threshold: Any) -> Any:
    """One bit per unsigned lane that is >= the lane of threshold, as uint64; bit 0 is lane 0."""

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

    return types.int64(types.uint64), codegen


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

    return types.int64(types.uint64), codegen
