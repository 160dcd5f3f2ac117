"""What a host accumulator accepts as a gradient, and in which pieces it reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.layout import native_bits

__all__ = ["accumulating", "checked_gradient", "pieces", "squares"]

Array = NDArray[Any]


def accumulating(dtype: Any) -> type[np.floating[Any]]:
    """The type in which gradients of a type accumulate.

    Args:
        dtype: float32, float64, float16 or bfloat16, by name, or as NumPy or PyTorch know it.

    Returns:
        float64 for float64, float32 for all others.

    Raises:
        ArgumentError: another type.

    Example:
        >>> accumulating("bfloat16").__name__
        'float32'
    """
    name = str(getattr(dtype, "name", getattr(dtype, "__name__", dtype))).removeprefix("torch.")
    if name not in ("float16", "bfloat16", "uint16", "float32", "float64"):
        raise ArgumentError("dtype", dtype, "float32, float64, float16 or bfloat16")
    return np.float64 if name == "float64" else np.float32


def checked_gradient(gradient: Any, num_elements: int, dtype: np.dtype[Any]) -> Array:
    """A gradient as an array that can be folded.

    Args:
        gradient: any shape and strides; bfloat16 as its bits (uint16) or from ml_dtypes.
        num_elements: n, which it must have.
        dtype: of the accumulator.

    Returns:
        The array, not a copy.

    Raises:
        ArgumentError: another number of elements, a type that does not fit, or read-only memory.
    """
    array = np.asarray(gradient)
    if array.size != num_elements:
        raise ArgumentError("gradient", array.shape, f"an array of {num_elements} elements")
    if accumulating(array.dtype) != dtype:
        raise ArgumentError("gradient", array.dtype.name, f"a type that accumulates in {dtype.name}")
    if not array.flags.writeable:
        raise ArgumentError("gradient", "read-only memory", "memory that can be set to 0")
    return array


def pieces(array: Array, size: int) -> Iterator[tuple[int, Array]]:
    """The gradient as arrays the kernels can read and clear; all of it is 0 when they are used up.

    Contiguous memory is one piece, the memory itself. Anything else goes through a small buffer; it
    is cleared at the end only, since with strides of 0 elements share their memory.

    Args:
        array: what `checked_gradient` returned; read in C order.
        size: elements per buffer, a multiple of the block size.

    Yields:
        Position in the bucket, and the piece.
    """
    if array.flags.carray and array.dtype.isnative:
        yield 0, native_bits(array)
        return
    for start in range(0, array.size, size):
        chunk = np.array(array.flat[start : start + size], array.dtype.newbyteorder("="))
        yield start, native_bits(chunk)
    array[...] = 0


def squares(values: Array) -> float:
    """Sum of squares in float64.

    Args:
        values: shape (k,).

    Returns:
        The sum.
    """
    wide = values.astype(np.float64)
    return float(np.dot(wide, wide))
