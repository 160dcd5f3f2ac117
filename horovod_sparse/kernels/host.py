"""The host kernels with checked arguments: what `HostAccumulator` and the front ends call."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host_kth import between, kth_of, kth_of_values, sample
from horovod_sparse.kernels.host_select import collect, select_exactly
from horovod_sparse.kernels.lanes import LANES
from horovod_sparse.kernels.layout import Layout, bits_dtype, bits_of, float_of

__all__ = ["at_least", "kth_magnitude", "largest"]

Array = NDArray[Any]
Indices = NDArray[np.int32]

# Up to so many elements per block the block maxima bound the k-th largest well, and the k largest are
# found among candidates in a buffer of 12 k bytes. Above, a sample bounds it better.
_BUFFER_SHARE = 0.5


def _num_bits(values: Array) -> int:
    return values.itemsize * 8 - 1


def _candidates(
    values: Array, maxima: Array, layout: Layout, k: int, start: int, stop: int
) -> tuple[Indices, Array]:
    """The k largest of the window that are not 0 (fewer if there are fewer), ascending, with their keys."""
    first, last = layout.whole_blocks(start, stop)
    bits = maxima.dtype.type
    threshold = bits(1)
    if k <= last - first:
        threshold = max(bits(kth_of(maxima[first:last], k, _num_bits(values))[0]), bits(1))
    capacity = min(k + max(k // 2, 2048), stop - start) + layout.block
    indices, keys = np.empty(capacity, np.int32), np.empty(capacity, maxima.dtype)
    count, _ = collect(
        values, maxima, layout.block, threshold, start, stop, k, _num_bits(values), indices, keys
    )
    return indices[:count], keys[:count]


def _smallest(values: Array, maxima: Array, layout: Layout, k: int, start: int, stop: int) -> tuple[Any, int]:
    """Bits of the k-th largest of the window and how many are larger, with a small buffer.

    A sample tells between which two magnitudes the k-th lies, one pass collects what lies there and
    counts what is above. Should the sample have been wrong, the digits are counted instead.
    """
    size, bits, num_bits = stop - start, maxima.dtype.type, _num_bits(values)
    sampled = np.empty(min(size // 8 + 1, 65536), maxima.dtype)
    sample(values, start, stop, sampled)
    rank = k / size * sampled.size
    doubt = 4.0 * np.sqrt(rank * (1.0 - rank / sampled.size)) + 4.0
    below, above = int(np.ceil(rank + doubt)), int(rank - doubt)
    low = kth_of(sampled, below, num_bits)[0] if below <= sampled.size else 0
    high = kth_of(sampled, above, num_bits)[0] if above >= 1 else np.iinfo(bits).max
    buffer = np.empty(min(size, max(size // 32, 8192)) + LANES, maxima.dtype)
    larger, count = between(values, bits(low), bits(high), start, stop, buffer)
    if count >= 0 and larger < k <= larger + count:
        smallest, more = kth_of(buffer[:count], k - larger, num_bits)
        return bits(smallest), larger + more
    smallest, larger = kth_of_values(values, maxima, k, num_bits, start, stop)
    return bits(smallest), larger


def _fits_buffer(layout: Layout, k: int, start: int, stop: int) -> bool:
    return k <= max(2048, _BUFFER_SHARE * (stop - start) / layout.block)


def largest(
    values: Array, maxima: Array, layout: Layout, k: int, start: int = 0, stop: int | None = None
) -> Indices:
    """Exactly the k largest magnitudes of a window; ties go to the lowest index.

    Args:
        values: float32 or float64, shape (n,).
        maxima: their block maxima, exact.
        layout: of the blocks.
        k: how many; more than the window holds takes the whole window.
        start: first position of the window.
        stop: position after its last, None for n.

    Returns:
        int32, ascending.
    """
    start, stop = layout.window(start, stop)
    if k < 0:
        raise ArgumentError("num_selected", k, "0 or more")
    if k >= stop - start:
        return np.arange(start, stop, dtype=np.int32)
    if k == 0:
        return np.empty(0, np.int32)
    if _fits_buffer(layout, k, start, stop):
        indices, _ = _candidates(values, maxima, layout, k, start, stop)
        if indices.size == k:
            return indices.copy()
        smallest, larger = maxima.dtype.type(0), indices.size
    else:
        smallest, larger = _smallest(values, maxima, layout, k, start, stop)
    out = np.empty(k + LANES, np.int32)
    select_exactly(values, maxima, layout.block, smallest, k - larger, start, stop, k, out)
    return out[:k]


def kth_magnitude(
    values: Array, maxima: Array, layout: Layout, k: int, start: int = 0, stop: int | None = None
) -> float:
    """The exact k-th largest magnitude of a window.

    Args:
        values, maxima, layout, start, stop: as in `largest`.
        k: rank, from 1 to the number of elements in the window.

    Returns:
        The magnitude.
    """
    start, stop = layout.window(start, stop)
    if not 1 <= k <= stop - start:
        raise ArgumentError("k", k, f"a rank from 1 to {stop - start}, the elements of the window")
    if _fits_buffer(layout, k, start, stop):
        _, keys = _candidates(values, maxima, layout, k, start, stop)
        return float_of(keys.min(), values.dtype) if keys.size == k else 0.0
    return float_of(_smallest(values, maxima, layout, k, start, stop)[0], values.dtype)


def at_least(
    values: Array, maxima: Array, layout: Layout, threshold: float, start: int = 0, stop: int | None = None
) -> Indices:
    """All positions of a window whose magnitude is >= threshold and not 0.

    Args:
        values, layout, start, stop: as in `largest`.
        maxima: upper bounds of the block maxima.
        threshold: magnitude.

    Returns:
        int32, ascending.
    """
    start, stop = layout.window(start, stop)
    bits = bits_of(threshold, values.dtype)
    parts: list[Indices] = []
    capacity = min(4096, stop - start) + layout.block
    while start < stop:
        indices, keys = np.empty(capacity, np.int32), np.empty(capacity, bits_dtype(values.dtype))
        count, start = collect(
            values, maxima, layout.block, bits, start, stop, 0, _num_bits(values), indices, keys
        )
        parts.append(indices[:count])
        capacity = min(4 * capacity, max(stop - start, 0) + layout.block)
    if len(parts) == 1:
        return parts[0].copy()
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
