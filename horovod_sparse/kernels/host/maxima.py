"""Block maxima outside the fold: after an assignment, and after single elements changed."""

from __future__ import annotations

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.lanes import magnitude

__all__ = ["raise_maxima", "refresh_maxima", "scan_maxima"]


@kernel
def _maximum(values, start, stop):  # type: ignore[no-untyped-def]
    """Magnitude bits of the largest of [start, stop)."""
    tops = v.magnitudes(v.splat(values[start]))
    i = start
    while i + v.LANES <= stop:
        tops = v.larger(tops, v.magnitudes(v.load(values, i)))
        i += v.LANES
    top = v.top_of(tops)
    while i < stop:
        top = max(top, magnitude(values[i]))
        i += 1
    return top


@kernel
def scan_maxima(values, maxima, block):  # type: ignore[no-untyped-def]
    """Writes the maxima of all blocks.

    Args:
        values: float32 or float64, shape (n,).
        maxima: uint32 or uint64, shape (ceil(n / block),), overwritten with magnitude bits.
        block: elements per block.
    """
    for j in range(maxima.size):
        maxima[j] = _maximum(values, j * block, min(j * block + block, values.size))


@kernel
def refresh_maxima(values, maxima, block, indices):  # type: ignore[no-untyped-def]
    """Writes the maxima of the blocks that hold the given elements (ascending order saves work).

    Args:
        values, maxima, block: as in `scan_maxima`.
        indices: int32, shape (k,), within [0, n).
    """
    done = -1
    for index in indices:
        j = index // block
        if j != done:
            maxima[j] = _maximum(values, j * block, min(j * block + block, values.size))
            done = j


@kernel
def raise_maxima(values, maxima, block, indices):  # type: ignore[no-untyped-def]
    """Makes the maxima upper bounds again after the given elements changed.

    Args:
        values, maxima, block, indices: as in `refresh_maxima`.
    """
    for index in indices:
        j = index // block
        maxima[j] = max(maxima[j], magnitude(values[index]))
