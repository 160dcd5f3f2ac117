"""What a host accumulator accepts as a gradient, and in which pieces it reads it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host.fold import fold_factors
from horovod_sparse.kernels.host.scatter import native_bits, wide

Array = NDArray[Any]

#: elements from which an array is read in place, where its start and end are at hand of whole blocks
_LARGE = 1 << 16


class GradientParts:
    """The gradients of a bucket's parameters, one behind the other, to be folded and left alone.

    TensorFlow's tensors are immutable, and may be constants or share memory, so a fold must not set
    them to 0 as it does with PyTorch's. Large ones are read where they are; small ones, and what is
    left of large ones at their ends, are gathered in a buffer that stays in the cache.

    Args:
        arrays: contiguous, of one type: float32, float64, float16, or bfloat16 (its bits as uint16, or
            from ml_dtypes); any shapes.

    Raises:
        ArgumentError: if the types differ, or there is no array.

    Example:
        >>> parts = GradientParts([np.array([1.0, 2.0]), np.array([[3.0]])])
        >>> [(start, piece.tolist()) for start, piece in parts.pieces(size=2, block=2)]
        [(0, [1.0, 2.0]), (2, [3.0])]
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        # writeable: numba compiles kernels once more for memory that is not
        given = [
            array
            if isinstance(array, np.ndarray) and array.flags.carray
            else np.require(array, requirements=["C", "A", "W"])
            for array in arrays
        ]
        if len({array.dtype for array in given}) != 1:
            raise ArgumentError("gradient", [array.dtype.name for array in given], "arrays of one type")
        self.dtype = given[0].dtype
        self._flat = [native_bits(array) for array in given]
        self.size = sum(array.size for array in self._flat)

    def put_into(self, memory: Array) -> None:
        """Copies all elements, as they are.

        Args:
            memory: shape (size,), of the parts' own type: half types as their bits.

        Example:
            >>> memory = np.empty(2, np.float32)
            >>> GradientParts([np.ones(2, np.float32)]).put_into(memory); memory
            array([1., 1.], dtype=float32)
        """
        start = 0
        for array in self._flat:
            memory[start : start + array.size] = array
            start += array.size

    @property
    def native(self) -> np.dtype[Any]:
        """The type in which kernels get the parts: that of a half type's bits."""
        return self._flat[0].dtype

    def lies_at(self, address: int) -> bool:
        """Whether all elements lie one behind the other from an address on."""
        return len(self._flat) == 1 and self._flat[0].ctypes.data == address

    def joined(self, dtype: np.dtype[Any]) -> Array:
        """All elements as one array of a type: the memory itself, where it is one array of that type.

        Args:
            dtype: float32 or float64.

        Returns:
            Shape (size,), not to be written to.

        Example:
            >>> GradientParts([np.array([0x3F80], np.uint16)]).joined(np.dtype(np.float32))
            array([1.], dtype=float32)
        """
        arrays = [wide(array).astype(dtype, copy=False) for array in self._flat]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def pieces(self, size: int, block: int = 1) -> Iterator[tuple[int, Array]]:
        """Consecutive elements, some of them copied to a buffer that is used again: read one before the next.

        Args:
            size: elements of the buffer, a multiple of the block size.
            block: all pieces but the last are multiples of it.

        Yields:
            Position of its first element, and the piece, not to be written to.
        """
        buffer = np.empty(min(size, self.size), self._flat[0].dtype)
        start = filled = 0
        for array in self._flat:
            taken = 0
            while taken < array.size:
                if array.size - taken >= _LARGE and filled % block == 0:
                    if filled:
                        yield start, buffer[:filled]
                        start, filled = start + filled, 0
                    count = (array.size - taken) // block * block
                    yield start, array[taken : taken + count]
                    start, taken = start + count, taken + count
                    continue
                room = -filled % block if array.size - taken >= _LARGE else buffer.size - filled
                count = min(room, array.size - taken)
                buffer[filled : filled + count] = array[taken : taken + count]
                filled, taken = filled + count, taken + count
                if filled == buffer.size:
                    yield start, buffer
                    start, filled = start + filled, 0
        if filled:
            yield start, buffer[:filled]


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


def residual_memory(num_elements: int, kind: type[np.floating[Any]], memory: Array | None) -> Array:
    """The memory of an accumulator: the given one, checked, or new zeros.

    Args:
        num_elements: n.
        kind: float32 or float64.
        memory: shape (n,), or None.

    Returns:
        shape (n,), contiguous.

    Raises:
        ArgumentError: the given memory has another shape or type, or holds NaN or Inf.
    """
    if memory is None:
        # NumPy asks for huge pages, which matters to what touches single elements far apart.
        return np.zeros(num_elements, kind)
    if memory.dtype != kind or memory.shape != (num_elements,) or not memory.flags.carray:
        allowed = f"contiguous {kind.__name__} of shape ({num_elements},)"
        raise ArgumentError("memory", (memory.dtype.name, memory.shape), allowed)
    if not np.isfinite(memory).all():
        raise ArgumentError("memory", "NaN or Inf", "finite numbers")
    return memory


@functools.lru_cache(maxsize=32)  # they are the same in most folds
def checked_factors(
    dtype: np.dtype[Any],
    decay: float,
    momentum: float | None,
    nesterov: bool,
    has_companion: bool,
    low_pass: float | None = None,
) -> Array:
    """The factors of a fold, for `kernels.host.fold.fold`.

    Args:
        dtype: of the accumulator.
        decay: factor of the old values.
        momentum: factor of the old velocity, or None.
        nesterov: Nesterov's form of momentum.
        has_companion: whether there is a velocity, or what a low-pass filter sums up.
        low_pass: beta of a low-pass filter, or None.

    Returns:
        shape (4,), not to be written to.

    Raises:
        ArgumentError: a factor is outside what is allowed, or there is no companion for the momentum or the
            filter, or both of them are asked for.
    """
    with np.errstate(over="ignore"):
        factors = fold_factors(dtype, decay, momentum or 0.0, nesterov)
    if not np.isfinite(factors[0]):
        raise ArgumentError("decay", decay, f"a number that {dtype.name} can hold")
    for name, factor in (("momentum", momentum), ("low_pass", low_pass)):
        if factor is not None and not has_companion:
            raise ArgumentError(name, factor, "None, or make the accumulator with companions=1")
    if low_pass is not None:
        if momentum is not None or not 0.0 < low_pass <= 1.0:
            raise ArgumentError("low_pass", low_pass, "a number in (0, 1], without momentum")
        # sum = decay * sum + gradient; values = (1 - beta) * gradient + beta * sum
        beta = dtype.type(low_pass)
        return np.array([0.0, factors[0], 1 - beta, beta], dtype)
    if momentum is not None and not 0.0 <= momentum <= 1.0:
        raise ArgumentError("momentum", momentum, "a number in [0, 1]")
    return factors


def checked_gradient(gradient: Any, num_elements: int, dtype: np.dtype[Any]) -> Array | GradientParts:
    """A gradient as an array that can be folded.

    Args:
        gradient: any shape and strides; bfloat16 as its bits (uint16) or from ml_dtypes. Or parts, which
            stay as they are.
        num_elements: n, which it must have.
        dtype: of the accumulator.

    Returns:
        The array or the parts, not a copy.

    Raises:
        ArgumentError: another number of elements, a type that does not fit, or read-only memory.
    """
    array = gradient if isinstance(gradient, GradientParts) else np.asarray(gradient)
    if array.size != num_elements:
        shape = getattr(array, "shape", (array.size,))
        raise ArgumentError("gradient", shape, f"an array of {num_elements} elements")
    if array.dtype != dtype and accumulating(array.dtype) != dtype:
        raise ArgumentError("gradient", array.dtype.name, f"a type that accumulates in {dtype.name}")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ArgumentError("gradient", "read-only memory", "memory that can be set to 0")
    return array


def pieces(array: Array | GradientParts, size: int, block: int = 1) -> Iterator[tuple[int, Array]]:
    """The gradient as arrays the kernels can read and clear; all of it is 0 when they are used up.

    Contiguous memory is one piece, the memory itself. Parts are to be kept: nothing clears them. Anything
    else goes through a small buffer; it is cleared at the end only, since with strides of 0 elements
    share their memory.

    Args:
        array: what `checked_gradient` returned; read in C order.
        size: elements per buffer, a multiple of the block size.
        block: of parts, all pieces but the last are multiples of it.

    Yields:
        Position in the bucket, and the piece.
    """
    if isinstance(array, GradientParts):
        yield from array.pieces(size, block)
        return
    if array.flags.carray and array.dtype.isnative:
        yield 0, native_bits(array)
        return
    for start in range(0, array.size, size):
        chunk = np.array(array.flat[start : start + size], array.dtype.newbyteorder("="))
        yield start, native_bits(chunk)
    array[...] = 0
