"""Compiling ahead of time what a training will call."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host import fold, kth, scatter, select
from horovod_sparse.kernels.host import maxima as block_maxima
from horovod_sparse.kernels.host import statistics as estimates
from horovod_sparse.kernels.host.scatter import native_bits
from horovod_sparse.kernels.layout import Layout, bits_dtype

_HELD_AS = {"float32": "float32", "float64": "float64", "float16": "float16", "bfloat16": "uint16"}


def warm_up(dtype: str = "float32", *, momentum: bool = False, statistics: bool = False) -> None:
    """Compiles the host kernels for gradients of one type, or reads them from the disk cache.

    Not needed, since each kernel compiles when it is first called; but then that step is slow.

    Args:
        dtype: "float32", "float64", "float16" or "bfloat16".
        momentum: the fold with momentum correction too.
        statistics: what statistical thresholds need too.

    Raises:
        ArgumentError: another type.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _HELD_AS:
        raise ArgumentError("dtype", dtype, "float32, float64, float16 or bfloat16")
    gradient = native_bits(np.zeros(5000, _HELD_AS[name]))
    values = np.zeros(gradient.size, np.float64 if name == "float64" else np.float32)
    layout = Layout(values.size)
    maxima = np.zeros(layout.num_blocks, bits_dtype(values.dtype))
    one, report = values.dtype.type(1), np.zeros(3)
    # gradients are kept until the sum is there: the kernels for that are others
    fold.fold_plain(values, gradient, maxima, layout.block, one, report, True)
    if momentum:
        factors = np.zeros(4, values.dtype)
        fold.fold_momentum(
            values, np.zeros_like(values), gradient, maxima, layout.block, factors, report, True
        )
    values[:] = 1
    _select(values, maxima, layout)
    _scatter(values, maxima, layout, gradient)
    if statistics:
        keys = maxima[:2].copy()
        estimates.count_at_least(values, maxima, layout.block, keys, np.zeros(2, np.int64))
        estimates.moments_at_least(values, keys[0], np.zeros(4))


def _select(values: NDArray[Any], maxima: NDArray[Any], layout: Layout) -> None:
    block_maxima.scan_maxima(values, maxima, layout.block)
    select.at_least(values, maxima, layout, 0.5)
    select.largest(values, maxima, layout, 5)
    select.largest(values, maxima, layout, values.size // 2)
    kth.kth_of_values(values, maxima, 1, values.itemsize * 8 - 1, 0, values.size)


def _scatter(values: NDArray[Any], maxima: NDArray[Any], layout: Layout, gradient: NDArray[Any]) -> None:
    indices = np.arange(3, dtype=np.int32)
    taken = np.empty(3, values.dtype)
    scatter.take_at(values, indices, taken)
    scatter.zero_at(values, indices)
    scatter.put_at(values, indices, taken)
    scatter.add_at(values, indices, taken)
    block_maxima.refresh_maxima(values, maxima, layout.block, indices)
    block_maxima.raise_maxima(values, maxima, layout.block, indices)
    dense = gradient.view(np.float16) if gradient.dtype == np.int16 else gradient
    scatter.apply_sum(dense, indices, taken)
    scatter.clear_at(dense, indices)
