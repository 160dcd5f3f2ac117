"""Sums of arrays that lie in different memory, a few elements at a time."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.lanes import read

Array = NDArray[Any]


@kernel
def sum_two(total, one, other, factors):  # type: ignore[no-untyped-def]
    """total = factors[0] * one + factors[1] * other.

    Args:
        total: float32 or float64, shape (n,); overwritten.
        one, other: shape (n,), float of the same type, or the bits of a half type (see lanes.py).
        factors: shape (2,), of the type of total.
    """
    n = total.size
    whole = n // v.LANES * v.LANES
    of_one, of_other = v.splat(factors[0]), v.splat(factors[1])
    for i in range(0, whole, v.LANES):
        left, right = v.multiply(of_one, v.load(one, i)), v.multiply(of_other, v.load(other, i))
        v.store(total, i, v.add(left, right))
    for i in range(whole, n):
        total[i] = factors[0] * read(one, i) + factors[1] * read(other, i)


@kernel
def add_more(total, more, factor):  # type: ignore[no-untyped-def]
    """total += factor * more; see `sum_two`."""
    n = total.size
    whole = n // v.LANES * v.LANES
    factors = v.splat(factor)
    for i in range(0, whole, v.LANES):
        v.store(total, i, v.add(v.load(total, i), v.multiply(factors, v.load(more, i))))
    for i in range(whole, n):
        total[i] += factor * read(more, i)


def sum_into(total: Array, arrays: list[Array], factors: Array) -> None:
    """Adds arrays up in their order, each times its factor.

    Args:
        total: float32 or float64, shape (n,); overwritten. Where it stays in the cache, memory is read once.
        arrays: two or more, shape (n,) each, of the type of total or, for float32, the bits of a half type.
        factors: shape (len(arrays),), of the type of total.

    Example:
        >>> import numpy as np
        >>> total = np.empty(2, np.float32)
        >>> sum_into(total, [np.ones(2, np.float32)] * 3, np.array([1, 2, 0.5], np.float32)); total
        array([3.5, 3.5], dtype=float32)
    """
    sum_two(total, arrays[0], arrays[1], factors[:2])
    for array, factor in zip(arrays[2:], factors[2:], strict=True):
        add_more(total, array, factor)
