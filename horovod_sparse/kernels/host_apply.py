"""Scatter into and clear dense arrays of any supported type, with checked indices."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.kernels import host_scatter
from horovod_sparse.kernels.layout import check_indices, native_bits

__all__ = ["apply_sum", "checked", "clear_all", "clear_at", "compiled_for"]

Array = NDArray[Any]


def checked(indices: Any, num_elements: int) -> NDArray[np.int32]:
    """Indices as contiguous int32, all within [0, num_elements).

    Args:
        indices: integers, shape (k,).
        num_elements: n of what they point into.

    Returns:
        The same array where it already is contiguous int32.

    Raises:
        MessageError: one points outside.
    """
    given = np.asarray(indices)
    if given.dtype != np.int32:
        if given.size and given.dtype.kind not in "iu":
            raise MessageError(f"indices are {given.dtype.name}, not integers")
        if given.size and (given.min() < 0 or given.max() >= num_elements):
            check_indices(given, int(np.argmax((given < 0) | (given >= num_elements))), num_elements)
    ready = compiled_for(given, np.int32)
    check_indices(ready, host_scatter.find_outside(ready, num_elements), num_elements)
    return ready


def compiled_for(array: Any, kind: Any) -> Array:
    """The array, or a copy, in the one form that the kernels are compiled for.

    What comes out of a message may be read-only or start at an odd address, and numba would compile
    every kernel once more for each such kind.

    Args:
        array: numbers, shape (k,).
        kind: the dtype wanted.

    Returns:
        shape (k,), contiguous, aligned, writeable, in native byte order.
    """
    if isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == kind and array.flags.carray:
        return array  # at once: NumPy takes longer to find that out than a kernel for a small bucket
    return np.require(np.asarray(array).reshape(-1), kind, ["C", "A", "W"])


def _flat(dense: Array) -> Array:
    if not dense.flags.carray or not dense.dtype.isnative:
        raise ArgumentError("dense", dense.strides, "a contiguous, aligned and writeable array")
    return native_bits(dense)


def apply_sum(dense: Array, indices: Any, values: Any) -> int:
    """Adds values to a dense array (a zeroed gradient, usually) at the given places.

    Repeated indices add up: in order for float32 and float64; in float32 with a single rounding at the
    end for float16 and bfloat16. A sum that cancels to zero is stored as -0.0.

    Args:
        dense: float32, float64, float16, bfloat16 or uint16 (the bits of bfloat16), contiguous; changed.
        indices: shape (k,), within [0, n), in any order, may repeat.
        values: shape (k,).

    Returns:
        How many different elements held +0.0 before: the size of the union, if dense was zero.

    Raises:
        ArgumentError: dense is not contiguous or has another type.
        MessageError: an index is outside, or the lengths differ; nothing was written then.

    Example:
        >>> gradient = np.zeros(4, np.float32)
        >>> apply_sum(gradient, np.array([1, 3, 1]), np.array([1.0, 2.0, 0.5]))
        2
        >>> gradient.tolist()
        [0.0, 1.5, 0.0, 2.0]
    """
    flat = _flat(dense)
    where = checked(indices, flat.size)
    kind = np.dtype(np.float64) if flat.dtype == np.float64 else np.dtype(np.float32)
    new = compiled_for(values, kind)
    if new.size != where.size:
        raise MessageError(f"{where.size} indices came with {new.size} values")
    if flat.dtype.kind == "f":
        return int(host_scatter.add_at(flat, where, new))
    order = np.argsort(where, kind="stable")
    where, new = where[order], new[order]
    totals = np.empty_like(new)
    runs, first_touches = host_scatter.add_runs_at(flat, where, new, totals)
    host_scatter.put_at(flat, where[:runs], _narrow(totals[:runs], flat.dtype))
    return int(first_touches)


def _narrow(totals: Array, kind: np.dtype[Any]) -> Array:
    """float32 to the bits of float16 (int16) or bfloat16 (uint16), to nearest, ties to even."""
    if kind == np.int16:
        with np.errstate(over="ignore"):
            return totals.astype(np.float16).view(np.int16)
    bits = totals.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    return np.where(np.isnan(totals), ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16), rounded)


def clear_all(dense: Array) -> None:
    """Sets a dense array to 0, past the caches where it is large: half the time of an ordinary loop.

    Args:
        dense: contiguous, of any type that is 0 where all bits are.

    Raises:
        ArgumentError: dense is not contiguous.

    Example:
        >>> gradient = np.ones(3, np.float32)
        >>> clear_all(gradient); gradient
        array([0., 0., 0.], dtype=float32)
    """
    if not dense.flags.carray:
        raise ArgumentError("dense", dense.strides, "a contiguous, aligned and writeable array")
    ctypes.memset(dense.ctypes.data, 0, dense.nbytes)


def clear_at(dense: Array, indices: Any) -> None:
    """Sets the given places of a dense array to 0.

    Args:
        dense: as in `apply_sum`.
        indices: shape (k,), within [0, n).

    Raises:
        MessageError: an index is outside; nothing was written then.
    """
    flat = _flat(dense)
    host_scatter.clear_at(flat, checked(indices, flat.size))
