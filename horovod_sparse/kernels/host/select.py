"""Looking inside the blocks whose maximum passes: thresholds, candidates, exactly k.

Kernels first, then what calls them with checked arguments.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.host.kth import copy_largest, keys_between, kth_of, kth_of_values
from horovod_sparse.kernels.layout import Layout, bits_dtype
from horovod_sparse.kernels.packing import append, append_positions

Array = NDArray[Any]
Indices = NDArray[np.int32]

# Blocks whose maxima are looked at in one go: what passes is prefetched before it is opened.
_GROUP = 512
# If more than one block in so many passes, opening only those is no faster than reading everything.
_CROWDED = 6
# Up to so many elements per block the block maxima bound the k-th largest well, and the k largest are
# found among candidates in a buffer of 12 k bytes. Above, a sample bounds it better.
_BUFFER_SHARE = 0.5
# Elements whose memory is asked for ahead, while a chunk's candidates are compared.
_FURTHER = 1024


@kernel
def _scan(values, start, stop, threshold, indices, keys, count):  # type: ignore[no-untyped-def]
    """Appends elements of values[start:stop] with magnitude bits >= threshold; returns the new count."""
    thresholds = v.splat(threshold)
    i = start
    while i + v.LANES <= stop:
        sizes = v.magnitude(v.load(values, i))
        count = append(sizes, v.mask_at_least(sizes, thresholds), i, indices, keys, count)
        i += v.LANES
    while i < stop:
        key = v.magnitude(values[i])
        if key >= threshold:
            indices[count] = i
            keys[count] = key
            count += 1
        i += 1
    return count


@kernel
def _list_blocks(maxima, threshold, first, last, passing):  # type: ignore[no-untyped-def]
    """Writes the numbers of blocks in [first, last) whose maximum reaches the threshold; returns how many."""
    count = 0
    thresholds = v.splat(threshold)
    j = first
    while j + v.LANES <= last:
        count = append_positions(v.mask_at_least(v.load(maxima, j), thresholds), j, passing, count)
        j += v.LANES
    while j < last:
        if maxima[j] >= threshold:
            passing[count] = j
            count += 1
        j += 1
    return count


@kernel
def _prefetch_blocks(values, block, passing, size):  # type: ignore[no-untyped-def]
    """Prefetches the memory of all listed blocks, before the first of them is read."""
    per_line = 64 // values.itemsize
    for p in range(size):
        start = passing[p] * block
        for line in range(start, min(start + block, values.size), per_line):
            v.prefetch(values, line)


@kernel
def _keep_largest(indices, keys, count, k, num_bits):  # type: ignore[no-untyped-def]
    """Moves the k largest of `count` elements to the front (of equal ones the first); returns the k-th."""
    smallest, larger = kth_of(keys[:count], k, num_bits)
    copy_largest(indices, keys, count, smallest, k - larger, indices, keys)
    return smallest


@kernel
def collect(values, maxima, block, threshold, start, stop, k, num_bits, indices, keys):  # type: ignore[no-untyped-def]
    """Lists elements of [start, stop) with magnitude bits >= threshold: all, or with k > 0 the k largest.

    Returns how many, and where it stopped: before `stop` if the buffers are full. With k > 0, when they are
    full, the k largest so far stay, and the smallest of these raises the threshold. A later equal magnitude
    has a higher index and loses its tie, so only larger ones pass, and the result is exact.
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
    count = _scan(values, start, head, threshold, indices, keys, count)
    group = first
    while group < last:
        group_stop = min(group + _GROUP, last)
        size = _list_blocks(maxima, threshold, group, group_stop, passing)
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
                threshold = v.successor(_keep_largest(indices, keys, count, k, num_bits))
                count = k
            count = _scan(values, j * block, min(j * block + block, n), threshold, indices, keys, count)
        group = group_stop
    tail = max(head, last * block)
    if tail < stop:
        if count + block > capacity:
            if k == 0:
                return count, tail
            threshold = v.successor(_keep_largest(indices, keys, count, k, num_bits))
            count = k
        count = _scan(values, tail, stop, threshold, indices, keys, count)
    if k > 0 and count > k:
        _keep_largest(indices, keys, count, k, num_bits)
        count = k
    return count, stop


@kernel
def select_exactly(values, maxima, block, smallest, ties, start, stop, k, indices):  # type: ignore[no-untyped-def]
    """Writes the indices of elements above `smallest`, and the first `ties` equal to it; returns how many."""
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
                sizes = v.magnitude(v.load(values, i))
                mask = v.mask_at_least(sizes, thresholds)
                equal = mask & v.mask_at_least(thresholds, sizes)
                if equal != 0:
                    here = v.count_bits(equal)
                    while here > ties:
                        mask = v.without_last_bit(mask, equal)
                        equal = v.without_last_bit(equal, equal)
                        here -= 1
                    ties -= here
                count = append_positions(mask, i, indices, count)
                i += v.LANES
            else:
                key = v.magnitude(values[i])
                if key >= smallest and count < k:
                    tie = key == smallest
                    if not tie or ties > 0:
                        ties -= tie
                        indices[count] = i
                        count += 1
                i += 1
    return count


@kernel
def _num_at_least(keys, count, low):  # type: ignore[no-untyped-def]
    """Counts the keys >= `low`, which is above 0, so that the zeros that pad the keys do not count."""
    limits, reached = v.splat(v.as_key(keys[0], low)), 0
    for i in range(0, count, v.LANES):
        reached += v.count_bits(v.mask_at_least(v.load(keys, i), limits))
    return reached


@kernel
def _kth_of_few(keys, count, k, low):  # type: ignore[no-untyped-def]
    """Returns a key >= `low` that exactly k of `count` keys reach, or the k-th largest, by bisection."""
    tops = v.load(keys, 0)
    for i in range(v.LANES, count, v.LANES):
        tops = v.lane_maximum(tops, v.load(keys, i))
    high = np.int64(v.largest_lane(tops))
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = _num_at_least(keys, count, middle)
        if reached == k:
            return middle
        low, high = (middle, high) if reached > k else (low, middle - 1)
    return low


@kernel
def _list_at_least(values, start, stop, threshold, indices, keys):  # type: ignore[no-untyped-def]
    """Does what `_scan` does from count 0, with prefetching: for whole chunks."""
    count, thresholds, i = 0, v.splat(threshold), start
    while i + v.LANES <= stop:
        v.prefetch(values, i + _FURTHER)
        sizes = v.magnitude(v.load(values, i))
        count = append_positions(v.mask_at_least(sizes, thresholds), i, indices, count)
        i += v.LANES
    for j in range(count):
        keys[j] = v.magnitude(values[indices[j]])
    return _scan(values, i, stop, threshold, indices, keys, count)


@kernel
def _select_of_each(values, chunk, quotas, step, exponent, keys, indices, out, found):  # type: ignore[no-untyped-def]
    """Writes indices and values of the largest elements of every chunk, as many as the chunk's quota.

    Chunks are like their neighbours: a little less than the last one's smallest bounds this one's. How much
    less is learned, from `step` on; where too few reach it a half is looked for, then an eighth, and so on.
    """
    at, guess, most = 0, np.int64(0), 16 * step
    for number in range(quotas.size):
        k, start = quotas[number], number * chunk
        stop = min(start + chunk, values.size)
        if k == 0:
            continue
        count = _list_at_least(values, start, stop, v.as_key(keys[0], guess), indices, keys)
        further = exponent
        while count < k:
            step, guess = min(2 * step, most), max(guess - further, np.int64(0))
            count = _list_at_least(values, start, stop, v.as_key(keys[0], guess), indices, keys)
            further *= 2
        v.store(keys, count, v.splat(v.as_key(keys[0], 0)))
        smallest = _kth_of_few(keys, count, k, guess)
        larger = _num_at_least(keys, count, smallest + 1)
        copy_largest(indices, keys, count, v.as_key(keys[0], smallest), k - larger, indices, keys)
        for i in range(k):
            out[at + i] = indices[i]
            found[at + i] = values[indices[i]]
        at += k
        step -= step // 8 if count > 2 * k else 0
        guess = max(smallest - step, np.int64(0))


#: in 1024ths of an exponent: 0.85 to 0.93 of a magnitude, which about twice as many elements reach
_LOWER = 150
#: every 7th block maximum is read if more than 4096 elements are wanted; 7, since rows of tensors often have
#: a power of two as length
_STRIDE, _SAMPLED = 7, 4096


def _num_key_bits(values: Array) -> int:
    return values.itemsize * 8 - 1


def _largest_and_keys(
    values: Array, maxima: Array, layout: Layout, k: int, start: int, stop: int
) -> tuple[Indices, Array]:
    """Returns indices and keys of a window's k largest elements; fewer than k if the others are 0."""
    whole = stop - start == values.size
    first, last = (0, maxima.size) if whole else layout.whole_blocks(start, stop)
    bits, num_bits = maxima.dtype.type, _num_key_bits(values)
    capacity = min(k + max(k // 2, 2048), stop - start) + layout.block
    indices, keys = np.empty(capacity, np.int32), np.empty(capacity, maxima.dtype)
    for stride in (_STRIDE, 1) if _SAMPLED < k < (last - first) // 2 else (1,):
        tops, threshold = np.ascontiguousarray(maxima[first:last:stride]), bits(1)
        rank = k if stride == 1 else int(k / stride + 4.0 * math.sqrt(k / stride))
        if rank <= tops.size:
            threshold = max(bits(kth_of(tops, rank, num_bits)[0]), bits(1))
        count, _ = collect(values, maxima, layout.block, threshold, start, stop, k, num_bits, indices, keys)
        if count == k:  # nearly always: a threshold that k elements reach is at most the k-th
            break
    return indices[:count], keys[:count]


def _kth_bits(values: Array, maxima: Array, k: int, start: int, stop: int) -> tuple[Any, int]:
    """Returns the bits of a window's k-th largest magnitude, and how many are larger, by a sample's bounds.

    The sample has one element of each of many equal stretches. Which one varies, since layers repeat with
    strides of their own; it is the same in every run.
    """
    size, bits, num_bits = stop - start, maxima.dtype.type, _num_key_bits(values)
    numbers = np.arange(min(size // 8 + 1, 65536))
    stretch = size // numbers.size
    # Knuth's multiplicative hash
    jitter = ((numbers * 2654435761) & 0xFFFFFFFF) * stretch >> 32
    sampled = np.abs(values[start + numbers * stretch + jitter]).view(maxima.dtype)
    rank = k / size * sampled.size
    doubt = 4.0 * np.sqrt(rank * (1.0 - rank / sampled.size)) + 4.0
    below, above = int(np.ceil(rank + doubt)), int(rank - doubt)
    low = kth_of(sampled, below, num_bits)[0] if below <= sampled.size else 0
    high = kth_of(sampled, above, num_bits)[0] if above >= 1 else np.iinfo(bits).max
    buffer = np.empty(min(size, max(size // 32, 8192)) + v.LANES, maxima.dtype)
    larger, count = keys_between(values, bits(low), bits(high), start, stop, buffer)
    if count >= 0 and larger < k <= larger + count:
        smallest, more = kth_of(buffer[:count], k - larger, num_bits)
        return bits(smallest), larger + more
    smallest, larger = kth_of_values(values, k, num_bits, start, stop)
    return bits(smallest), larger


def _fits_buffer(layout: Layout, k: int, start: int, stop: int) -> bool:
    return k <= max(2048, _BUFFER_SHARE * (stop - start) / layout.block)


def largest(values: Array, maxima: Array, k: int, start: int, stop: int, layout: Layout) -> Indices:
    """Returns the indices of a window's k largest magnitudes, ascending; of equal ones the first."""
    if _fits_buffer(layout, k, start, stop):
        indices, _ = _largest_and_keys(values, maxima, layout, k, start, stop)
        if indices.size == k:
            return indices.copy()
        smallest, larger = maxima.dtype.type(0), indices.size
    else:
        smallest, larger = _kth_bits(values, maxima, k, start, stop)
    out = np.empty(k + v.LANES, np.int32)
    select_exactly(values, maxima, layout.block, smallest, k - larger, start, stop, k, out)
    return out[:k]


def kth(values: Array, maxima: Array, k: int, start: int, stop: int, layout: Layout) -> Any:
    """Returns the magnitude bits of a window's k-th largest element, 1 <= k <= stop - start."""
    if _fits_buffer(layout, k, start, stop):
        _, keys = _largest_and_keys(values, maxima, layout, k, start, stop)
        return keys.min() if keys.size == k else 0
    return _kth_bits(values, maxima, k, start, stop)[0]


def at_least(values: Array, maxima: Array, bits: Any, start: int, stop: int, layout: Layout) -> Indices:
    """Returns a window's indices with magnitude bits >= `bits`; block maxima say which blocks to read."""
    parts: list[Indices] = []
    capacity = min(4096, stop - start) + layout.block
    while start < stop:
        indices, keys = np.empty(capacity, np.int32), np.empty(capacity, maxima.dtype)
        count, start = collect(
            values, maxima, layout.block, bits, start, stop, 0, _num_key_bits(values), indices, keys
        )
        parts.append(indices[:count])
        capacity = min(4 * capacity, max(stop - start, 0) + layout.block)
    if len(parts) == 1:
        return parts[0].copy()
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def largest_of_each(values: Array, chunk: int, quotas: NDArray[np.int64]) -> tuple[Indices, Array]:
    """Returns indices and values of the largest elements of every chunk, as many as the chunk's quota."""
    room = min(chunk, values.size) + v.LANES
    keys, out = np.empty(room, bits_dtype(values.dtype)), np.empty(int(quotas.sum()), np.int32)
    exponent = 1 << np.finfo(values.dtype).nmant
    step = _LOWER * exponent >> 10
    found = np.empty(out.size, values.dtype)
    _select_of_each(values, chunk, quotas, step, exponent, keys, np.empty(room, np.int32), out, found)
    return out, found
