"""The k-th largest of unsigned integers, by a radix select from the top digit down; candidates of a fold."""

from __future__ import annotations

import numpy as np

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.packing import append_keys

# Bits per digit: 2048 counters of 4 bytes, times the ways, stay in the first-level cache.
_DIGIT = 11
# Neighbours often share a digit; counting them in turn in four tables keeps the adds independent.
_WAYS = 4
# In place of a number of candidates: there was no room for all.
FULL = -1


@kernel
def _pick_bin(counts, k):  # type: ignore[no-untyped-def]
    """Returns the histogram bin with the k-th largest key, and how many keys lie in higher bins."""
    above = 0
    for bin_ in range(counts.shape[0] - 1, -1, -1):
        here = 0
        for way in range(counts.shape[1]):
            here += counts[bin_, way]
        if above + here >= k:
            return bin_, above
        above += here
    return 0, above


@kernel
def kth_of(keys, k, num_bits):  # type: ignore[no-untyped-def]
    """Returns the k-th largest (k from 1) of keys below 2**num_bits, and how many keys are larger."""
    scratch = np.empty(0, keys.dtype)
    current = keys
    left = num_bits
    larger = 0
    while left > 0 and current.size > 1:
        width = min(_DIGIT, left)
        left -= width
        mask = (1 << width) - 1
        counts = np.zeros((1 << width, _WAYS), np.uint32)
        whole = current.size // _WAYS * _WAYS
        for i in range(0, whole, _WAYS):
            for way in range(_WAYS):
                counts[v.digit(current[i + way], left, mask), way] += 1
        for i in range(whole, current.size):
            counts[v.digit(current[i], left, mask), 0] += 1
        chosen, above = _pick_bin(counts, k)
        size = 0
        for way in range(_WAYS):
            size += counts[chosen, way]
        larger += above
        k -= above
        if size < current.size:
            # One element more: the write below happens before it is known whether it counts.
            scratch = np.empty(size + 1, keys.dtype)
            kept = 0
            for i in range(current.size):
                key = current[i]
                scratch[kept] = key
                kept += v.digit(key, left, mask) == chosen
            current = scratch[:size]
    return current[0], larger


@kernel
def kth_of_values(values, k, num_bits, start, stop):  # type: ignore[no-untyped-def]
    """Returns the magnitude bits of the k-th largest of values[start:stop], and how many are larger."""
    mask_all = (1 << num_bits) - 1
    prefix = 0
    left = num_bits
    larger = 0
    while left > 0:
        width = min(_DIGIT, left)
        upper = left
        left -= width
        mask = (1 << width) - 1
        counts = np.zeros((1 << width, _WAYS), np.int64)
        for i in range(start, stop):
            bits = v.raw_bits(values[i])
            if v.digit(bits, 0, mask_all) >> upper == prefix:
                counts[v.digit(bits, left, mask), i % _WAYS] += 1
        chosen, above = _pick_bin(counts, k)
        larger += above
        k -= above
        prefix = (prefix << width) | chosen
    return prefix, larger


@kernel
def keys_between(values, low, high, start, stop, keys):  # type: ignore[no-untyped-def]
    """Writes keys in [low, high] of values[start:stop] to `keys`; returns how many are above, and these."""
    lows, highs = v.splat(low), v.splat(high)
    above, count = 0, 0
    i = start
    while i < stop:
        if count + v.LANES > keys.size:
            return above, -1
        if i + v.LANES <= stop:
            sizes = v.magnitude(v.load(values, i))
            not_above = v.mask_at_least(highs, sizes)
            above += v.LANES - v.count_bits(not_above)
            count = append_keys(sizes, not_above & v.mask_at_least(sizes, lows), keys, count)
            i += v.LANES
        else:
            key = v.magnitude(values[i])
            above += key > high
            if low <= key <= high:
                keys[count] = key
                count += 1
            i += 1
    return above, count


@kernel
def raise_bound(bound, k, indices, bits, count):  # type: ignore[no-untyped-def]
    """Raises a fold's bound to the k-th largest candidate, drops those below; returns how many remain."""
    if not 0 < k <= count:
        return count
    num_bits = 8 * bits.itemsize - 1
    smallest, _ = kth_of(bits[:count], k, num_bits)
    bound[0] = v.digit(smallest, 0, (1 << num_bits) - 1)
    v.store(bits, count, v.splat(v.as_key(smallest, 0)))
    bounds, kept = v.splat(bound[0]), 0
    for i in range(0, count, v.LANES):  # in place: elements are read before they are overwritten
        lanes, where = v.load(bits, i), v.load(indices, i)
        mask = v.mask_at_least(v.magnitude(lanes), bounds)
        append_keys(where, mask, indices, kept)
        kept = append_keys(lanes, mask, bits, kept)
    return kept


@kernel
def kth_above(bits, count, k, bound, num_bits, width):  # type: ignore[no-untyped-def]
    """Returns the k-th largest of `count` candidates, none below `bound`, and how many are larger."""
    counts = np.zeros((1 << _DIGIT, _WAYS), np.uint32)
    mask, most = (1 << num_bits) - 1, (1 << _DIGIT) - 1
    low = v.digit(bound, 0, mask)
    for i in range(count):
        counts[min((v.digit(bits[i], 0, mask) - low) >> width, most), i % _WAYS] += 1
    chosen, above = _pick_bin(counts, k)
    size = 0
    for way in range(_WAYS):
        size += counts[chosen, way]
    low += chosen << width
    high = mask if chosen == most else low + (1 << width) - 1
    keys = np.empty(size + v.LANES, bits.dtype)
    _, size = keys_between(bits, v.as_key(bits[0], low), v.as_key(bits[0], high), 0, count, keys)
    smallest, more = kth_of(keys[:size], k - above, num_bits)
    return smallest, above + more


@kernel
def copy_largest(indices, bits, count, smallest, ties, out, found):  # type: ignore[no-untyped-def]
    """Copies candidates above `smallest`, and the first `ties` equal to it: to `out` and `found`.

    `out` and `found` may be `indices` and `bits` themselves: what is overwritten was read before.
    """
    limits, kept, i = v.splat(smallest), 0, 0
    while i + v.LANES <= count:
        lanes, where = v.load(bits, i), v.load(indices, i)
        sizes = v.magnitude(lanes)
        mask = v.mask_at_least(sizes, limits)
        equal = mask & v.mask_at_least(limits, sizes)
        if equal != 0:
            here = v.count_bits(equal)
            while here > ties:
                mask, equal = v.without_last_bit(mask, equal), v.without_last_bit(equal, equal)
                here -= 1
            ties -= here
        append_keys(where, mask, out, kept)
        kept = append_keys(lanes, mask, found, kept)
        i += v.LANES
    while i < count:
        tie = v.magnitude(bits[i]) == smallest
        if v.magnitude(bits[i]) > smallest or (tie and ties > 0):
            out[kept], found[kept] = indices[i], bits[i]
            ties -= tie
            kept += 1
        i += 1
