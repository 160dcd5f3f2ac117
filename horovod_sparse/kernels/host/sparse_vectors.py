"""Sparse vectors, as ascending indices with a value each: merged, split, looked up, summed and moved by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.host import scatter
from horovod_sparse.kernels.host.scatter import AHEAD, fill_tile
from horovod_sparse.kernels.lanes import magnitude, raw_bits

Array = NDArray[Any]
#: values at ascending, unique positions
Vector = tuple[NDArray[np.int32], Array]

#: a sum at more than one position in so many is subtracted from all elements of a tile
_SPARSE = 16
#: elements of a tile that stays in the first-level cache beside its sums
_SMALL = 1024


@kernel
def merge_add(first, first_values, second, second_values, indices, values):  # type: ignore[no-untyped-def]
    """Adds two sparse vectors by index.

    No branch depends on the data but the end: which side an index comes from is a coin toss.
    """
    a, b = first.size, second.size
    i, j, count = 0, 0, 0
    while i < a and j < b:
        left, right = first[i], second[j]
        from_first, from_second = left <= right, right <= left
        indices[count] = left if from_first else right
        one = first_values[i] if from_first else first_values.dtype.type(0)
        other = second_values[j] if from_second else second_values.dtype.type(0)
        # adding 0 to a lone value changes nothing, but -0.0, which is as good
        values[count] = one + other
        i += from_first
        j += from_second
        count += 1
    while i < a:
        indices[count], values[count] = first[i], first_values[i]
        i += 1
        count += 1
    while j < b:
        indices[count], values[count] = second[j], second_values[j]
        j += 1
        count += 1
    return count


@kernel
def keys_of(values, keys):  # type: ignore[no-untyped-def]
    """Magnitude bits of values, as integers that order like the magnitudes."""
    for i in range(values.size):
        keys[i] = magnitude(values[i])


@kernel
def split_at(indices, values, keys, smallest, ties, kept, kept_values, rest, rest_values):  # type: ignore[no-untyped-def]
    """Splits a sparse vector at a magnitude; of those equal to it the first `ties` are kept."""
    num_kept, num_rest = 0, 0
    for i in range(indices.size):
        key = keys[i]
        tie = key == smallest
        keep = (key > smallest) | (tie & (ties > 0))
        ties -= tie
        kept[num_kept], kept_values[num_kept] = indices[i], values[i]
        rest[num_rest], rest_values[num_rest] = indices[i], values[i]
        num_kept += keep
        num_rest += not keep


@kernel
def absent(indices, others, out):  # type: ignore[no-untyped-def]
    """out[i] = whether indices[i] is not among the others; both ascending."""
    j, m = 0, others.size
    for i in range(indices.size):
        index = indices[i]
        while j < m and others[j] < index:
            j += 1
        out[i] = j == m or others[j] != index


@kernel
def _replace(values, first, undone, factors, crowded, sums, tile, again, kept):  # type: ignore[no-untyped-def]
    """Puts old values back, multiplies by factors[0], subtracts a sum over ranks, and moves again.

    `undone`, `sums` and `again` are indices, values, and where each run of them begins and stops; indices
    count from the start of a bucket, in which the array begins at `first`. `kept` becomes what stood there
    before each new move. Returns at how many places there was a sum.
    """
    (back, olds, back_at, back_stops), (more, steps, more_at, more_stops) = undone, again
    where, totals, at, stops = sums
    streams = crowded or factors[0] != 1
    num_union, factor, minus, begun = 0, v.splat(factors[0]), v.splat(factors[1]), at.copy()
    for begin in range(0, values.size, tile.size):
        stop = min(begin + tile.size, values.size)
        last = first + stop
        if streams and back.size != 0:  # in order: what reads memory ahead does not follow scattered places
            for i in range(begin, stop, 64 // values.itemsize):
                v.prefetch(values, i)
        for run in range(back_at.size):
            i = back_at[run]
            while i < back_stops[run] and back[i] < last:
                if not streams and i + AHEAD < back.size:
                    v.prefetch(values, back[i + AHEAD] - first)
                values[back[i] - first] = olds[i]
                i += 1
            back_at[run] = i
        for run in range(at.size):
            begun[run] = at[run]
        num_union += fill_tile(tile, where, totals, at, stops, first + begin, last)
        whole = begin + (stop - begin) // (2 * v.LANES) * (2 * v.LANES)
        if crowded:
            for i in range(begin, whole, v.LANES):
                less = v.multiply(minus, v.load(tile, i - begin))
                v.store(values, i, v.add(v.multiply(factor, v.load(values, i)), less))
                v.store(tile, i - begin, v.zeros_like(factor))
            for i in range(whole, stop):
                values[i] = factors[0] * values[i] - tile[i - begin]
                tile[i - begin] = 0
        elif streams:
            for i in range(begin, whole, 2 * v.LANES):
                j = i + v.LANES
                one, other = v.load(values, i), v.load(values, j)
                v.store(values, i, v.multiply(factor, one))
                v.store(values, j, v.multiply(factor, other))
            for i in range(whole, stop):
                values[i] *= factors[0]
        if not crowded:
            for run in range(at.size):
                for i in range(begun[run], at[run]):
                    if not streams and i + AHEAD < where.size:
                        v.prefetch(values, where[i + AHEAD] - first)
                    place = where[i] - first
                    total = tile[place - begin]
                    if raw_bits(total) != 0:  # the first of a repeated place takes the sum
                        values[place] -= total
                        tile[place - begin] = 0
        for run in range(more_at.size):
            i = more_at[run]
            while i < more_stops[run] and more[i] < last:
                if not streams and i + AHEAD < more.size:
                    v.prefetch(values, more[i + AHEAD] - first)
                kept[i] = values[more[i] - first]
                values[more[i] - first] -= steps[i]
                i += 1
            more_at[run] = i
    return num_union


def _joined(vectors: Sequence[Vector], dtype: Any) -> tuple[Array, Array, Array, Array]:
    """Returns indices and values of all vectors in a row, and the start and stop of each."""
    indices = [scatter.compiled_for(one, np.int32) for one, _ in vectors] or [np.empty(0, np.int32)]
    values = [scatter.compiled_for(one, dtype) for _, one in vectors] or [np.empty(0, dtype)]
    stops = np.cumsum([one.size for one in indices])
    joined = (
        (indices[0], values[0]) if len(indices) == 1 else (np.concatenate(indices), np.concatenate(values))
    )
    return *joined, np.append(0, stops[:-1]), stops


def replace(
    arrays: Sequence[tuple[Array, int, float]],
    undone: Sequence[Vector] = (),
    total: Vector | None = None,
    again: Sequence[Vector] = (),
) -> tuple[int, list[Array]]:
    """Replaces moves in arrays of a bucket by a sum over ranks, reading each array once.

    Args:
        arrays: float32 or float64; each with its start in the bucket, and a factor for all its elements.
        undone: old values that are put back before, in this order.
        total: subtracted after the factor; places may repeat, and ascend by rank.
        again: subtracted after that, in this order.

    Returns:
        At how many places there was a sum, and what stood at those of `again` before each.

    Example:
        >>> array, one = np.array([1.0, 2.0, 4.0]), np.array([1], np.int32)
        >>> put, add = [(one, np.array([8.0]))], [(one, np.array([0.5]))]
        >>> replace([(array, 0, 0.5)], put, (np.array([1, 1], np.int32), np.ones(2)), add), array.tolist()
        ((1, [array([2.])]), [0.5, 1.5, 2.0])
    """
    dtype, num_elements = arrays[0][0].dtype, sum(array.size for array, *_ in arrays)
    back, more = _joined(undone, dtype), _joined(again, dtype)
    where, new = _joined([] if total is None else [total], dtype)[:2]
    sums = scatter.runs_of(scatter.checked(where, num_elements), new)
    tile, kept, num_union = scatter.aligned_tile(dtype), np.empty(more[0].size, dtype), 0
    crowded = where.size * _SPARSE > num_elements
    for array, first, factor in arrays:
        factors = np.array([factor, -1], dtype)
        own = tile if crowded or factor == 1.0 else tile[:_SMALL]
        num_union += int(_replace(array, first, back, factors, crowded, sums, own, more, kept))
    return num_union, np.split(kept, np.cumsum([one.size for one, _ in again])[:-1]) if again else []
