"""What touches k elements only: take, clear, scatter-add."""

from __future__ import annotations

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.scalars import raw_bits, read

__all__ = ["add_at", "add_runs_at", "clear_at", "find_outside", "put_at", "take_at"]

# Indices looked ahead: every element is a cache line of its own, far from the last.
_AHEAD = 24


@kernel
def find_outside(indices, num_elements):  # type: ignore[no-untyped-def]
    """Position of an index outside [0, num_elements), or -1."""
    low, high = 0, 0
    for i in range(indices.size):
        low = min(low, indices[i])
        high = max(high, indices[i])
    if low >= 0 and (high < num_elements or indices.size == 0):
        return -1
    for i in range(indices.size):
        if indices[i] < 0 or indices[i] >= num_elements:
            return i
    return -1


@kernel
def take_at(values, indices, out):  # type: ignore[no-untyped-def]
    """out = values[indices]."""
    m = indices.size
    for i in range(m):
        if i + _AHEAD < m:
            v.prefetch(values, indices[i + _AHEAD])
        out[i] = values[indices[i]]


@kernel
def put_at(values, indices, new):  # type: ignore[no-untyped-def]
    """values[indices] = new; of repeated indices the last one counts."""
    m = indices.size
    for i in range(m):
        if i + _AHEAD < m:
            v.prefetch(values, indices[i + _AHEAD])
        values[indices[i]] = new[i]


@kernel
def clear_at(values, indices):  # type: ignore[no-untyped-def]
    """values[indices] = 0."""
    m = indices.size
    for i in range(m):
        if i + _AHEAD < m:
            v.prefetch(values, indices[i + _AHEAD])
        values[indices[i]] = 0


@kernel
def add_at(values, indices, new):  # type: ignore[no-untyped-def]
    """values[indices] += new, in order; returns how many different elements held +0.0 before.

    A sum that comes out as +0.0 is stored as -0.0, which is the same number and tells that it was
    touched: the count stays right where values cancel.
    """
    m = indices.size
    first_touches = 0
    for i in range(m):
        if i + _AHEAD < m:
            v.prefetch(values, indices[i + _AHEAD])
        old = values[indices[i]]
        first_touches += raw_bits(old) == 0
        total = old + new[i]
        values[indices[i]] = total if raw_bits(total) != 0 else -total
    return first_touches


@kernel
def add_runs_at(values, indices, new, narrowed):  # type: ignore[no-untyped-def]
    """Sums runs of equal indices in float32 on top of what a half-precision array holds there.

    Args:
        values: bits of float16 (int16) or bfloat16 (uint16), shape (n,).
        indices: int32, ascending, may repeat.
        new: float32, in the same order.
        narrowed: float32, overwritten: the sums, one per run, to be rounded by the caller.

    Returns:
        Number of runs, and how many of their elements held +0.0.
    """
    runs, first_touches, i = 0, 0, 0
    while i < indices.size:
        index = indices[i]
        first_touches += values[index] == 0
        total = read(values, index)
        while i < indices.size and indices[i] == index:
            total += new[i]
            i += 1
        indices[runs] = index
        narrowed[runs] = total
        runs += 1
    return runs, first_touches
