"""Several gradients read as one that must stay as they are: a framework's own immutable tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.layout import native_bits

__all__ = ["GradientParts"]

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
