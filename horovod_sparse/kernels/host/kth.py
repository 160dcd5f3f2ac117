"""The k-th largest of unsigned integers: a radix select from the top digit down."""

from __future__ import annotations

import numpy as np

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.lanes import count_bits, digit, magnitude, mask_at_least, raw_bits
from horovod_sparse.kernels.packing import append_keys

# Bits per digit: 2048 counters of 4 bytes, times the ways, stay in the first-level cache.
_DIGIT = 11
# Neighbours often share a digit; counting them in turn in four tables keeps the adds independent.
_WAYS = 4


@kernel
def _pick_bin(counts, k):  # type: ignore[no-untyped-def]
    """The bin that holds the k-th largest, counted from the top, and how many lie above that bin."""
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
    """The k-th largest (k from 1 to keys.size) of keys below 2**num_bits; keys stay as they are."""
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
                counts[digit(current[i + way], left, mask), way] += 1
        for i in range(whole, current.size):
            counts[digit(current[i], left, mask), 0] += 1
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
                kept += digit(key, left, mask) == chosen
            current = scratch[:size]
    return current[0], larger


@kernel
def kth_of_values(values, maxima, k, num_bits, start, stop):  # type: ignore[no-untyped-def]
    """The k-th largest magnitude of values[start:stop], in place: one read of it per digit."""
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
            bits = raw_bits(values[i])
            if digit(bits, 0, mask_all) >> upper == prefix:
                counts[digit(bits, left, mask), i % _WAYS] += 1
        chosen, above = _pick_bin(counts, k)
        larger += above
        k -= above
        prefix = (prefix << width) | chosen
    return prefix, larger


@kernel
def sample(values, start, stop, keys):  # type: ignore[no-untyped-def]
    """Magnitude bits of one element out of each of keys.size equal stretches of [start, stop).

    Which one of a stretch varies, since layers repeat with strides of their own; it is the same in every run.
    """
    stretch = (stop - start) // keys.size
    for i in range(keys.size):
        # Knuth's multiplicative hash
        jitter = ((i * 2654435761) & 0xFFFFFFFF) * stretch >> 32
        keys[i] = magnitude(values[start + i * stretch + jitter])


@kernel
def between(values, low, high, start, stop, keys):  # type: ignore[no-untyped-def]
    """Collects the keys of values[start:stop] within [low, high] and counts those above."""
    lows, highs = v.splat(low), v.splat(high)
    above, count = 0, 0
    i = start
    while i < stop:
        if count + v.LANES > keys.size:
            return above, -1
        if i + v.LANES <= stop:
            sizes = v.magnitudes(v.load(values, i))
            not_above = mask_at_least(highs, sizes)
            above += v.LANES - count_bits(not_above)
            count = append_keys(sizes, not_above & mask_at_least(sizes, lows), keys, count)
            i += v.LANES
        else:
            key = magnitude(values[i])
            above += key > high
            if low <= key <= high:
                keys[count] = key
                count += 1
            i += 1
    return above, count
