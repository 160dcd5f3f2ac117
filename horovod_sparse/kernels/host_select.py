"""Looking inside the blocks whose maximum passes: thresholds, candidates, exactly k."""

from __future__ import annotations

import numpy as np

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.host_kth import kth_of
from horovod_sparse.kernels.masks import count_bits, mask_at_least, without_last_bit
from horovod_sparse.kernels.packing import append, append_keys, append_positions
from horovod_sparse.kernels.scalars import magnitude, successor

__all__ = ["collect", "select_exactly"]

# Blocks whose maxima are looked at in one go: what passes is prefetched before it is opened.
_GROUP = 512
# If more than one block in so many passes, opening only those is no faster than reading everything.
_CROWDED = 6


@kernel
def _open(values, start, stop, threshold, indices, keys, count):  # type: ignore[no-untyped-def]
    """Appends the elements of [start, stop) with magnitude bits >= threshold; there must be room."""
    thresholds = v.splat(threshold)
    i = start
    while i + v.LANES <= stop:
        sizes = v.magnitudes(v.load(values, i))
        count = append(sizes, mask_at_least(sizes, thresholds), i, indices, keys, count)
        i += v.LANES
    while i < stop:
        key = magnitude(values[i])
        if key >= threshold:
            indices[count] = i
            keys[count] = key
            count += 1
        i += 1
    return count


@kernel
def _list_blocks(values, maxima, block, threshold, first, last, passing):  # type: ignore[no-untyped-def]
    """Lists the blocks of [first, last) that pass, and asks for their memory."""
    count = 0
    thresholds = v.splat(threshold)
    j = first
    while j + v.LANES <= last:
        count = append_positions(mask_at_least(v.load(maxima, j), thresholds), j, passing, count)
        j += v.LANES
    while j < last:
        if maxima[j] >= threshold:
            passing[count] = j
            count += 1
        j += 1
    return count


@kernel
def _prefetch_blocks(values, block, passing, size):  # type: ignore[no-untyped-def]
    """Asks for the memory of the listed blocks, all at once, before the first is opened."""
    per_line = 64 // values.itemsize
    for p in range(size):
        start = passing[p] * block
        for line in range(start, min(start + block, values.size), per_line):
            v.prefetch(values, line)


@kernel
def _drop_last_ties(indices, keys, count, smallest, surplus):  # type: ignore[no-untyped-def]
    """Takes the last `surplus` keys equal to the smallest out of the buffers."""
    first = count
    while surplus > 0:
        first -= 1
        surplus -= keys[first] == smallest
    kept = first
    for i in range(first, count):
        if keys[i] != smallest:
            indices[kept], keys[kept] = indices[i], keys[i]
            kept += 1


@kernel
def _keep_largest(indices, keys, count, k, num_bits):  # type: ignore[no-untyped-def]
    """Keeps exactly the k largest of count candidates, ties by position; returns the smallest key."""
    smallest, _ = kth_of(keys[:count], k, num_bits)
    limits = v.splat(smallest)
    kept, i = 0, 0
    while i + v.LANES <= count:  # in place: what is overwritten was read before
        sizes, where = v.load(keys, i), v.load(indices, i)
        mask = mask_at_least(sizes, limits)
        append_keys(where, mask, indices, kept)
        kept = append_keys(sizes, mask, keys, kept)
        i += v.LANES
    while i < count:
        if keys[i] >= smallest:
            indices[kept], keys[kept] = indices[i], keys[i]
            kept += 1
        i += 1
    _drop_last_ties(indices, keys, kept, smallest, kept - k)
    return smallest


@kernel
def collect(values, maxima, block, threshold, start, stop, k, num_bits, indices, keys):  # type: ignore[no-untyped-def]
    """Elements of [start, stop) with magnitude bits >= threshold, ascending; all of them or the k largest.

    With k > 0 the buffers are a stream: when they are full, the k largest so far stay and the smallest
    of those raises the threshold for what follows. An equal magnitude further on then has a higher
    index and loses its tie, so only larger ones pass, and the result is exact whatever the data.

    Args:
        values: float32 or float64, shape (n,).
        maxima: upper bounds of the blocks' magnitude bits.
        block: elements per block.
        threshold: magnitude bits, of the type of maxima.
        start, stop: the window.
        k: 0 for all.
        num_bits: 31 or 63.
        indices, keys: int32 and like maxima, shape (capacity,), capacity >= k + block.

    Returns:
        How many were found, and the position from which to go on: below stop if the buffers were too
        small for all.
    """
    n = values.size
    capacity = indices.size
    first = (start + block - 1) // block
    last = maxima.size if stop >= n else stop // block
    passing = np.empty(_GROUP + v.LANES, np.int32)
    count = 0
    # Pieces: what stands before the first whole block, the blocks, what stands after the last.
    head = min(first * block, stop)
    if head - start > capacity:
        return count, start
    count = _open(values, start, head, threshold, indices, keys, count)
    group = first
    while group < last:
        group_stop = min(group + _GROUP, last)
        size = _list_blocks(values, maxima, block, threshold, group, group_stop, passing)
        # Memory is read fastest in one go: where many blocks pass, all are opened.
        all_blocks = size * _CROWDED > group_stop - group
        if all_blocks:
            size = group_stop - group
        else:
            _prefetch_blocks(values, block, passing, size)
        for p in range(size):
            j = group + p if all_blocks else passing[p]
            if not all_blocks and maxima[j] < threshold:
                continue
            if count + block > capacity:
                if k == 0:
                    return count, j * block
                threshold = successor(_keep_largest(indices, keys, count, k, num_bits))
                count = k
            count = _open(values, j * block, min(j * block + block, n), threshold, indices, keys, count)
        group = group_stop
    tail = max(head, last * block)
    if tail < stop:
        if count + block > capacity:
            if k == 0:
                return count, tail
            threshold = successor(_keep_largest(indices, keys, count, k, num_bits))
            count = k
        count = _open(values, tail, stop, threshold, indices, keys, count)
    if k > 0 and count > k:
        _keep_largest(indices, keys, count, k, num_bits)
        count = k
    return count, stop


@kernel
def select_exactly(values, maxima, block, smallest, ties, start, stop, k, indices):  # type: ignore[no-untyped-def]
    """Elements of [start, stop) above `smallest` and the first `ties` equal to it, ascending.

    Args:
        values, maxima, block, start, stop: as in `collect`.
        smallest: magnitude bits of the k-th largest of the window; 0 takes zeros as well.
        ties: how many of those equal to it belong to the k.
        k: how many there are.
        indices: int32, shape (k + LANES,) at least, filled up to k.
    """
    count = 0
    capacity = indices.size
    thresholds = v.splat(smallest)
    i = start
    while i < stop and count < k:
        j = i // block
        if maxima[j] < smallest:
            i = (j + 1) * block
            continue
        piece_stop = min((j + 1) * block, stop)
        while i < piece_stop:
            if i + v.LANES <= piece_stop and count + v.LANES <= capacity:
                sizes = v.magnitudes(v.load(values, i))
                mask = mask_at_least(sizes, thresholds)
                equal = mask & mask_at_least(thresholds, sizes)
                if equal != 0:
                    here = count_bits(equal)
                    while here > ties:
                        mask = without_last_bit(mask, equal)
                        equal = without_last_bit(equal, equal)
                        here -= 1
                    ties -= here
                count = append_positions(mask, i, indices, count)
                i += v.LANES
            else:
                key = magnitude(values[i])
                if key >= smallest and count < k:
                    tie = key == smallest
                    if not tie or ties > 0:
                        ties -= tie
                        indices[count] = i
                        count += 1
                i += 1
    return count
