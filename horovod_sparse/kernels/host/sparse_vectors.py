"""Sparse vectors (ascending indices with a value each): encoded as bits, and applied to parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.host import scatter
from horovod_sparse.kernels.host.scatter import AHEAD, fill_tile
from horovod_sparse.kernels.lanes import count_bits, first_bit, raw_bits, read

Array = NDArray[Any]
#: values at ascending, unique positions
Vector = tuple[NDArray[np.int32], Array]

#: a sum at more than one position in so many is subtracted from all elements
_SPARSE = 16
#: elements of a tile that stays in the first-level cache beside its sums
_TILE = 1024


@kernel
def encode_gaps(indices, low_bits, low_words, words):  # type: ignore[no-untyped-def]
    """Encodes ascending indices in Elias-Fano code: `low_bits` of every index, and the rest in unary.

    `words` is a view of an int32 buffer as uint32.
    """
    mask = (1 << low_bits) - 1
    pending, filled, at = 0, 0, 0
    if low_bits:
        for i in range(indices.size):
            pending |= (np.int64(indices[i]) & mask) << filled
            words[at] = np.uint32(pending)
            filled += low_bits
            full = filled >> 5
            pending >>= full << 5
            at += full
            filled &= 31
        if filled:  # the word that the last index began
            words[at] = np.uint32(pending)
    pending, at = 0, 0
    for i in range(indices.size):
        position = (np.int64(indices[i]) >> low_bits) + i
        pending = (pending if position >> 5 == at else 0) | (1 << (position & 31))
        at = position >> 5
        words[low_words + at] = np.uint32(pending)


@kernel
def decode_gaps(words, count, low_bits, low_words, num_elements, out):  # type: ignore[no-untyped-def]
    """Decodes `count` indices that `encode_gaps` wrote into `out`; returns False if the words are damaged."""
    ones = 0
    for at in range(low_words, words.size):
        ones += count_bits(np.int64(read(words, at)))
    if ones != count:
        return False
    mask = (1 << low_bits) - 1
    # unsigned: nothing looks whether a place is below 0
    i, base, bit, previous, wrong = np.uint64(0), 0, 0, -1, False
    for at in range(low_words, words.size, 2):  # two words at once: half as many ends to foresee
        pending = np.uint64(np.int64(read(words, at)))
        if at + 1 < words.size:
            pending |= np.uint64(np.int64(read(words, at + 1))) << np.uint64(32)
        while pending:
            pair = np.int64(read(words, bit >> 5)) | np.int64(read(words, (bit >> 5) + 1)) << 32
            low = (pair >> (bit & 31)) & mask
            index = (base + first_bit(pending)) << low_bits | low
            wrong |= index <= previous
            previous = index
            out[i] = index
            i += np.uint64(1)
            base -= 1
            bit += low_bits
            pending &= pending - np.uint64(1)
        base += 64
    return not wrong and previous < num_elements


@kernel
def encode_two_bits(values, largest, means, planes):  # type: ignore[no-untyped-def]
    """Writes two magnitudes of each 64 values to `means`, and two bits of each value to `planes`."""
    sizes = np.empty(values.size)
    planes[:] = 0
    for block in range(means.shape[0]):
        first, stop = 64 * block, min(64 * block + 64, values.size)
        total, sums, counts = 0.0, np.zeros(2), np.zeros(2)
        for i in range(first, stop):
            size = np.float64(abs(values[i]))
            sizes[i] = min(size, largest) if size == size else 0.0
            total += sizes[i]
        for i in range(first, stop):
            is_large = np.int64(sizes[i] > total / (stop - first))
            sums[is_large] += sizes[i]
            counts[is_large] += 1
            planes[0, i >> 5] |= np.uint32(np.int64(values[i] < 0) << (i & 31))
            planes[1, i >> 5] |= np.uint32(is_large << (i & 31))
        means[block] = sums / np.maximum(counts, 1)


@kernel
def decode_two_bits(means, planes, out):  # type: ignore[no-untyped-def]
    """Decodes the values that `encode_two_bits` wrote, with `means` as bfloat16 (their bits in uint16)."""
    for i in range(out.size):
        at, bit = i >> 5, i & 31
        size = read(means, 2 * (i >> 6) + (planes[1, at] >> bit & 1))
        out[i] = size * (1 - 2 * (planes[0, at] >> bit & 1)) + 0.0  # no -0


@kernel
def _replace(values, first, undone, factors, whole, sums, tile, again, kept):  # type: ignore[no-untyped-def]
    """Carries out `replace_moves` for one array; returns at how many indices there was a sum.

    `undone`, `sums` and `again` are indices, values, and where each run of them begins and stops; indices
    count from the start of a bucket, in which the array begins at `first`. `whole` says to read all elements,
    which is faster than reading scattered ones; a factor needs it. `kept` gets the values that stood there
    before each new move.
    """
    (back, olds, back_at, back_stops), (more, steps, more_at, more_stops) = undone, again
    where, totals, at, stops = sums
    num_union, factor, minus, begun = 0, v.splat(factors[0]), v.splat(factors[1]), at.copy()
    for begin in range(0, values.size, tile.size):
        stop = min(begin + tile.size, values.size)
        last = first + stop
        for run in range(back_at.size):
            i = back_at[run]
            while i < back_stops[run] and back[i] < last:
                if not whole and i + AHEAD < back.size:
                    v.prefetch(values, back[i + AHEAD] - first)
                values[back[i] - first] = olds[i]
                i += 1
            back_at[run] = i
        for run in range(at.size):
            begun[run] = at[run]
        num_union += fill_tile(tile, where, totals, at, stops, first + begin, last)
        if whole:
            end = begin + (stop - begin) // v.LANES * v.LANES
            for i in range(begin, end, v.LANES):
                v.prefetch(values, i + tile.size)  # nothing else reads ahead where places are scattered
                less = v.multiply(minus, v.load(tile, i - begin))
                v.store(values, i, v.add(v.multiply(factor, v.load(values, i)), less))
                v.store(tile, i - begin, v.zeros_like(factor))
            for i in range(end, stop):
                values[i] = factors[0] * values[i] - tile[i - begin]
                tile[i - begin] = 0
        else:
            for run in range(at.size):
                for i in range(begun[run], at[run]):
                    if i + AHEAD < where.size:
                        v.prefetch(values, where[i + AHEAD] - first)
                    place = where[i] - first
                    total = tile[place - begin]
                    if raw_bits(total) != 0:  # the first of a repeated place takes the sum
                        values[place] -= total
                        tile[place - begin] = 0
        for run in range(more_at.size):
            i = more_at[run]
            while i < more_stops[run] and more[i] < last:
                if not whole and i + AHEAD < more.size:
                    v.prefetch(values, more[i + AHEAD] - first)
                kept[i] = values[more[i] - first]
                values[more[i] - first] -= steps[i]
                i += 1
            more_at[run] = i
    return num_union


def _joined(vectors: Sequence[Vector], dtype: Any) -> tuple[Array, Array, Array, Array]:
    """Concatenates vectors; returns all indices and values, and where each vector starts and stops."""
    indices = [scatter.kernel_array(one, np.int32) for one, _ in vectors] or [np.empty(0, np.int32)]
    values = [scatter.kernel_array(one, dtype) for _, one in vectors] or [np.empty(0, dtype)]
    stops = np.cumsum([one.size for one in indices])
    joined = (
        (indices[0], values[0]) if len(indices) == 1 else (np.concatenate(indices), np.concatenate(values))
    )
    return *joined, np.append(0, stops[:-1]), stops


def replace_moves(
    arrays: Sequence[tuple[Array, int, float]],
    undone: Sequence[Vector] = (),
    total: Vector | None = None,
    again: Sequence[Vector] = (),
) -> tuple[int, list[Array]]:
    """Replaces moves by their mean: undoes moves, applies a factor and a sum over ranks, and moves again.

    Args:
        arrays: float32 or float64; each with its start in the bucket, and a factor for all its elements.
        undone: old values that are written back first, in this order.
        total: subtracted after the factor; indices may repeat, and ascend by rank.
        again: moves that are subtracted after that, in this order.

    Returns:
        At how many indices there was a sum, and the values before each move of `again`.

    Example:
        >>> array, one, twice = np.array([1.0, 2.0, 4.0]), np.array([1], np.int32), np.array([1, 1], np.int32)
        >>> put, add = [(one, np.array([8.0]))], [(one, np.array([0.5]))]
        >>> replace_moves([(array, 0, 0.5)], put, (twice, np.ones(2)), add), array.tolist()
        ((1, [array([2.])]), [0.5, 1.5, 2.0])
    """
    dtype, num_elements = arrays[0][0].dtype, sum(array.size for array, *_ in arrays)
    back, more = _joined(undone, dtype), _joined(again, dtype)
    where, new = _joined([] if total is None else [total], dtype)[:2]
    sums = scatter.split_runs(scatter.checked(where, num_elements), new)
    tile, kept, num_union = scatter.aligned_tile(dtype)[:_TILE], np.empty(more[0].size, dtype), 0
    crowded = where.size * _SPARSE > num_elements
    for array, first, factor in arrays:
        factors = np.array([factor, -1], dtype)
        given = array, first, back, factors, crowded or factor != 1.0, sums, tile, more, kept
        num_union += int(_replace(*given))
    return num_union, np.split(kept, np.cumsum([one.size for one, _ in again])[:-1]) if again else []
