"""Scattering a sum over ranks into a dense gradient, divided as `op` says."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import apply_sum

__all__ = ["apply_scaled_sum"]

Array = NDArray[Any]


def apply_scaled_sum(dense: Array, indices: Array, values: Array, scale: float) -> int:
    """Writes ``scale * sum`` into a dense array of zeros, where the sum has something.

    Sums are scaled, not summands, as Horovod does it: what cancels is 0, and where all ranks hold the
    same value an average is that value. Half types are summed and scaled in float32, rounded once.

    Args:
        dense: zeros, contiguous; float32, float64, float16, bfloat16 or uint16 (the bits of bfloat16).
        indices: int32 [k], within [0, n); repeated ones add up.
        values: float32 or float64 [k].
        scale: factor of the sums; 1 divided by the number of ranks for an average.

    Returns:
        How many different elements the sum has.

    Example:
        >>> gradient = np.zeros(3, np.float32)
        >>> apply_scaled_sum(gradient, np.array([2, 0, 2]), np.array([1.0, 4.0, 2.0]), 0.5)
        2
        >>> gradient.tolist()
        [2.0, 0.0, 1.5]
    """
    if scale == 1.0:
        return apply_sum(dense, indices, values)
    if dense.dtype not in (np.float32, np.float64):
        return apply_sum(dense, indices, values * values.dtype.type(scale))
    num_union = apply_sum(dense, indices, values)
    # an index that stands twice is written twice with the same value
    flat = dense.reshape(-1)
    flat[indices] = flat[indices] * flat.dtype.type(scale)
    return num_union
