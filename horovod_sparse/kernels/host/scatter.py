"""Kernels that touch k elements only: take, clear, scatter-add.

Functions below call them with checked arguments, for dense arrays of any supported type, and view arrays of
each type as kernels take them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.lanes import raw_bits, read
from horovod_sparse.kernels.layout import bits_dtype
from horovod_sparse.kernels.packing import append, append_keys

Array = NDArray[Any]

# Indices looked ahead: every element is a cache line of its own, far from the last.
AHEAD = 24
# Elements that are written together, from the first-level cache; ascending runs of indices that each tile is
# looked up in; bytes from which on sums are written past the caches: less may be read from there soon.
TILE, _MOST_RUNS, _LARGE, _LINE = 4096, 256, 1 << 22, 64


@kernel
def take_at(values, indices, out):  # type: ignore[no-untyped-def]
    """out = values[indices]."""
    m = indices.size
    for i in range(m):
        if i + AHEAD < m:
            v.prefetch(values, indices[i + AHEAD])
        out[i] = values[indices[i]]


@kernel
def put_at(values, indices, new):  # type: ignore[no-untyped-def]
    """values[indices] = new; for a repeated index the last value counts."""
    m = indices.size
    for i in range(m):
        if i + AHEAD < m:
            v.prefetch(values, indices[i + AHEAD])
        values[indices[i]] = new[i]


@kernel
def zero_at(values, indices):  # type: ignore[no-untyped-def]
    """values[indices] = 0."""
    m = indices.size
    for i in range(m):
        if i + AHEAD < m:
            v.prefetch(values, indices[i + AHEAD])
        values[indices[i]] = 0


@kernel
def add_at(values, indices, new):  # type: ignore[no-untyped-def]
    """values[indices] += new, one after the other, so repeated indices add up."""
    m = indices.size
    for i in range(m):
        if i + AHEAD < m:
            v.prefetch(values, indices[i + AHEAD])
        values[indices[i]] += new[i]


@kernel
def fill_tile(tile, indices, values, at, stops, start, stop):  # type: ignore[no-untyped-def]
    """Adds sparse runs' values to the tile [start, stop); returns how many of its elements had none before.

    A sum that comes out as +0.0 is stored as -0.0, which is the same number and tells that it was touched:
    the count stays right where values cancel.
    """
    first_touches = 0
    for run in range(at.size):
        i, last = at[run], stops[run]
        while i < last and read(indices, i) < stop:
            place = np.uint64(read(indices, i) - start)  # unsigned: numba checks no sign of the index
            old = tile[place]
            first_touches += raw_bits(old) == 0
            total = old + read(values, i)
            tile[place] = total if raw_bits(total) != 0 else -total
            i += 1
        at[run] = i
    return first_touches


@kernel
def write_runs(  # type: ignore[no-untyped-def]
    dense, indices, values, at, stops, scale, tile, head, past_caches, first
):
    """Overwrites `dense` with the scaled sum of sparse runs; returns how many different indices they have.

    Index i belongs to dense[i - first]. Run r, indices[at[r]:stops[r]], ascends; at[r] is moved past the
    last index within `dense`. `tile`, zeros that stay in the cache, adds up the runs, is copied to `dense`
    and zeroed. Tiles are aligned after the first `head` elements, as writes past the caches need.
    """
    first_touches, start, stop = 0, 0, min(head, dense.size)
    scales = v.splat(scale)
    while start < dense.size:
        first_touches += fill_tile(tile, indices, values, at, stops, first + start, first + stop)
        j = 0
        while start + j + v.LANES <= stop:
            lanes = v.multiply(scales, v.load(tile, j))
            if past_caches:
                v.stream(dense, start + j, lanes)
            else:
                v.store(dense, start + j, lanes)
            v.store(tile, j, v.zeros_like(scales))
            j += v.LANES
        while start + j < stop:
            dense[start + j] = scale * tile[j]
            tile[j] = 0
            j += 1
        start, stop = stop, min(stop + tile.size, dense.size)
    return first_touches


@kernel
def add_sorted_runs(indices, values, at, stops, tile, counts, where, totals, numbers):  # type: ignore[no-untyped-def]
    """Adds up sparse vectors of ascending indices; returns how many different indices they have.

    Writes these indices, ascending, to `where`, and the floats' bits of each sum and number of summands to
    `totals` and `numbers`; all have room for one vector more. `tile` and `counts` are zeros before and after.
    """
    found, some, zeros = 0, v.splat(v.as_key(raw_bits(counts[0]), 1)), v.zeros_like(v.load(tile, 0))
    while True:
        start = -1
        for run in range(at.size):
            if at[run] < stops[run] and (start < 0 or indices[at[run]] < start):
                start = np.int64(indices[at[run]])
        if start < 0:
            return found
        stop = 0
        for run in range(at.size):
            i, last = at[run], stops[run]
            while i < last and read(indices, i) - start < tile.size:
                place = np.uint64(read(indices, i) - start)  # unsigned: numba checks no sign of the index
                tile[place] += read(values, i)
                counts[place] += 1
                i += 1
            if i > at[run]:
                stop = max(stop, indices[i - 1] - start + 1)
            at[run] = i
        for j in range(0, stop, v.LANES):
            sums, summands = raw_bits(v.load(tile, j)), raw_bits(v.load(counts, j))
            mask = v.mask_at_least(summands, some)
            append(sums, mask, start + j, where, totals, found)
            found = append_keys(summands, mask, numbers, found)
            v.store(tile, j, zeros)
            v.store(counts, j, zeros)


def find_outside(indices: NDArray[np.int32], num_elements: int) -> int:
    """Returns the position of the first index outside [0, num_elements), or -1 if there is none."""
    unsigned = indices.view(np.uint32)  # below 0 is above all
    if unsigned.max(initial=0) < num_elements:
        return -1
    outside = np.flatnonzero(unsigned >= num_elements)
    return int(outside[0]) if outside.size else -1


def checked(indices: Any, num_elements: int, *, keep: bool = False) -> NDArray[np.int32]:
    """Returns the indices as contiguous int32; raises if one is outside [0, num_elements)."""
    given = np.asarray(indices)
    if given.dtype != np.int32:
        if given.size and given.dtype.kind not in "iu":
            raise MessageError(f"a message's indices are {given.dtype.name}, must be integers")
        if given.size and (given.min() < 0 or given.max() >= num_elements):
            raise _outside_error(given, int(np.argmax((given < 0) | (given >= num_elements))), num_elements)
    ready = kernel_array(given, np.int32)
    if (position := find_outside(ready, num_elements)) >= 0:
        raise _outside_error(ready, position, num_elements)
    return ready.copy() if keep else ready


def _outside_error(indices: Array, position: int, num_elements: int) -> MessageError:
    return MessageError(
        f"index {int(indices[position])} (position {position}) is outside a bucket of {num_elements} "
        "elements: the ranks do not hold the same plan, or a message was damaged"
    )


def kernel_array(array: Any, kind: Any) -> Array:
    """Returns the array as kernels take it: flat, of dtype `kind`, aligned, writeable; copied if need be."""
    if isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == kind and array.flags.carray:
        return array  # at once: NumPy takes longer to find that out than a kernel for a small bucket
    return np.require(np.asarray(array).reshape(-1), kind, ["C", "A", "W"])


def taken_at(values: Array, indices: Array) -> Array:
    """Returns values[indices] as a new array, for indices that are `checked`."""
    out = np.empty(indices.size, values.dtype)
    take_at(values, indices, out)
    return out


def native_bits(array: Array) -> Array:
    """Returns a flat view in a dtype that kernels accept: half types as 16-bit integers."""
    flat = array.reshape(-1)
    if array.dtype in (np.float32, np.float64, np.uint16):
        return flat
    if array.dtype == np.float16:
        return flat.view(np.int16)
    if array.dtype.name == "bfloat16":
        return flat.view(np.uint16)
    known = "float32, float64, float16 or bfloat16 (its bits as uint16)"
    raise ArgumentError("dtype", array.dtype.name, known)


def widen(chunk: Array) -> Array:
    """Converts an array of `native_bits` to float32; float32 and float64 stay as they are."""
    if chunk.dtype == np.uint16:
        bits: Array = (chunk.astype(np.uint32) << 16).view(np.float32)
        return bits
    return chunk.view(np.float16).astype(np.float32) if chunk.dtype == np.int16 else chunk


def narrow(numbers: Array, dtype: Any) -> Array:
    """Converts float32 numbers to `native_bits` of a half type, rounding to nearest, ties to even."""
    if dtype == np.int16:
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).view(np.int16)
    if dtype != np.uint16:
        return numbers
    bits = numbers.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Adding to the bits of a NaN could make it a number.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(numbers), quiet, rounded).astype(np.uint16)


def _checked_flat(dense: Array) -> Array:
    if not dense.flags.carray or not dense.dtype.isnative:
        raise ArgumentError("dense", dense.strides, "a contiguous, aligned and writeable array")
    return native_bits(dense)


def checked_pair(kind: np.dtype[Any], num_elements: int, indices: Any, values: Any) -> tuple[Array, Array]:
    """Returns a sum's indices and values in the form that kernels take; raises if their sizes differ."""
    where = checked(indices, num_elements)
    new = kernel_array(values, np.dtype(np.float64 if kind == np.float64 else np.float32))
    if new.size != where.size:
        raise MessageError(f"{where.size} indices came with {new.size} values: a message was damaged")
    return where, new


def apply_scaled_sum(dense: Array, indices: Array | None, values: Array, scale: float) -> int:
    """Overwrites an array with ``scale * sum``, 0 elsewhere; returns how many different indices the sum has.

    Sums are scaled, not summands, as Horovod does it: what cancels is 0, and where all ranks hold the
    same value an average is that value. Half types are summed and scaled in float32, rounded once.
    """
    flat = _checked_flat(dense)
    return apply_scaled_sums([dense], [(0, flat.size)], indices, values, scale)


def apply_scaled_sums(
    arrays: Sequence[Array],
    spans: Sequence[tuple[int, int]],
    indices: Array | None,
    values: Array,
    scale: float,
) -> int:
    """Does what `apply_scaled_sum` does, for a bucket's arrays, each with its [start, stop) in the bucket."""
    flats = [_checked_flat(array) for array in arrays]
    kind, num_elements = flats[0].dtype, spans[-1][1]
    if indices is None:
        if len(values) != num_elements:
            raise MessageError(f"a dense sum has {len(values)} values, must have {num_elements}")
        pairs = zip(flats, spans, strict=True)
        return sum(_overwrite(flat, values[start:stop], scale) for flat, (start, stop) in pairs)
    where, new = checked_pair(kind, num_elements, indices, values)
    if kind.kind != "f":
        return _write_half_types(arrays, spans, where, new if scale == 1.0 else new * new.dtype.type(scale))
    where, new, at, stops = split_runs(where, new)
    tile, num_union = aligned_tile(kind), 0
    for flat, (start, _) in zip(flats, spans, strict=True):
        head, past_caches = -flat.ctypes.data % _LINE // kind.itemsize, flat.nbytes >= _LARGE
        runs = where, new, at, stops, kind.type(scale), tile, head, past_caches, start
        num_union += int(write_runs(flat, *runs))
    return num_union


def _write_half_types(
    arrays: Sequence[Array], spans: Sequence[tuple[int, int]], indices: Array, values: Array
) -> int:
    """Writes a sum to arrays of float16 or bfloat16, 0 elsewhere; returns the number of different indices."""
    where, totals, _ = sum_duplicates(indices, values)
    for array, (start, stop) in zip(arrays, spans, strict=True):
        flat, here = native_bits(array), slice(*np.searchsorted(where, (start, stop)))
        # past the caches where it is large: half the time of an ordinary loop
        ctypes.memset(array.ctypes.data, 0, array.nbytes)
        put_at(flat, where[here] - np.int32(start), narrow(totals[here], flat.dtype))
    return int(where.size)


def sum_duplicates(indices: Array, values: Array) -> tuple[Array, Array, Array]:
    """Returns the different indices, ascending, with the sum and the number of the values at each.

    Example:
        >>> sum_duplicates(np.array([3, 0, 3], np.int32), np.array([1.0, 2.0, 4.0]))
        (array([0, 3], dtype=int32), array([2., 5.]), array([1., 2.]))
    """
    where, new, at, stops = split_runs(kernel_array(indices, np.int32), kernel_array(values, values.dtype))
    room, bits = where.size + v.LANES, bits_dtype(new.dtype)
    found, totals, numbers = np.empty(room, np.int32), np.empty(room, bits), np.empty(room, bits)
    tiles = aligned_tile(new.dtype), aligned_tile(new.dtype)
    count = add_sorted_runs(where, new, at, stops, *tiles, found, totals, numbers)
    return found[:count], totals[:count].view(new.dtype), numbers[:count].view(new.dtype)


def aligned_tile(dtype: np.dtype[Any]) -> Array:
    """Returns an array of zeros for `fill_tile` that begins at a cache line, which makes access faster."""
    room = np.zeros(TILE + _LINE, dtype)
    return room[-room.ctypes.data % _LINE // dtype.itemsize :][:TILE]


def split_runs(indices: Array, values: Array) -> tuple[Array, Array, Array, Array]:
    """Splits a sum where indices descend (sorts if too often); returns indices, values, starts and stops."""
    stops = np.append(np.flatnonzero(indices[1:] < indices[:-1]) + 1, indices.size)
    if stops.size > _MOST_RUNS:
        order = np.argsort(indices, kind="stable")
        indices, values, stops = indices[order], values[order], stops[-1:]
    return indices, values, np.append(0, stops[:-1]), stops


def _overwrite(flat: Array, values: Array, scale: float) -> int:
    """Overwrites an array with scale times a dense sum; returns the number of elements."""
    if flat.dtype == values.dtype:
        np.multiply(values, flat.dtype.type(scale), out=flat) if scale != 1.0 else np.copyto(flat, values)
    else:
        flat[...] = narrow(values if scale == 1.0 else values * values.dtype.type(scale), flat.dtype)
    return int(flat.size)
