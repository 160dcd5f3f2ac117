"""A gradient that is the sum of several arrays, added up while it is folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays.gradients import GradientParts
from horovod_sparse.kernels.host.fold import Pair
from horovod_sparse.kernels.host.sums import sum_into

Array = NDArray[Any]

#: elements that are added up at a time: they stay in the cache until they are folded
_CHUNK = 1 << 17


class SummedParts(GradientParts):
    """The sum of arrays of other ranks, in their order; nothing of n elements is written for it.

    Args:
        arrays: two or more, shape (m,) each, as kernels get them: half types as their bits. Only read.
        factors: of each array.
        num_elements: n, from m; elements behind the arrays' last are 0.
        dtype: of the sum, float32 or float64.

    Example:
        >>> parts = SummedParts([np.array([1.0, 2.0]), np.array([0.5, 0.5])], [1.0, 2.0], 3, np.float64)
        >>> parts.joined(np.dtype(np.float64))
        array([2., 3., 0.])
    """

    def __init__(
        self, arrays: Sequence[Array], factors: Sequence[float], num_elements: int, dtype: Any
    ) -> None:
        self.dtype, self.size = np.dtype(dtype), num_elements
        self._arrays = list(arrays)
        self._factors = np.array(factors, self.dtype)
        self._settled: GradientParts | None = None

    def settle(self) -> None:
        """Keeps the sum, of n elements, instead of the arrays that it is made of."""
        if self._settled is None:
            self._settled = GradientParts([self.joined(self.dtype)])
            self._arrays = []

    def joined(self, dtype: np.dtype[Any]) -> Array:
        """See `GradientParts.joined`."""
        if self._settled is not None:
            return self._settled.joined(dtype)
        whole = np.empty(self.size, self.dtype)
        for start, stop in self._bounds(_CHUNK):
            self._add(whole[start:stop], start)
        return whole.astype(dtype, copy=False)

    def pieces(self, size: int, block: int = 1, first: int = 0) -> Iterator[tuple[int, Array]]:
        """See `GradientParts.pieces`.

        Args:
            size: see there.
            block: see there.
            first: where the first piece begins, a multiple of the block size.
        """
        if self._settled is not None:
            yield from self._settled.pieces(size, block)
            return
        chunk = max(1, min(size, _CHUNK) // block) * block
        buffer = np.empty(min(chunk, self.size), self.dtype)
        for start, stop in self._bounds(chunk, first):
            piece = buffer[: stop - start]
            self._add(piece, start)
            yield start, piece

    def pairs(self, block: int) -> Iterator[tuple[int, Array | Pair]]:
        """As `pieces`, but the last two summands are left to who folds them: memory is read once, by all.

        Args:
            block: all pieces but the last are multiples of it.
        """
        whole = 0 if self._settled is not None else self._arrays[0].size // block * block
        chunk = whole if len(self._arrays) == 2 else max(1, _CHUNK // block) * block
        buffer = np.empty(0 if chunk == whole else chunk, self.dtype)
        for start in range(0, whole, max(1, chunk)):
            parts = [array[start : min(start + chunk, whole)] for array in self._arrays]
            factors = self._factors
            if len(parts) > 2:
                one = buffer[: parts[0].size]
                sum_into(one, parts[:-1], factors[:-1])
                parts, factors = [one, parts[-1]], np.array([1, factors[-1]], self.dtype)
            yield start, Pair(parts[0], parts[1], factors)
        yield from self.pieces(_CHUNK, block, whole)

    def _bounds(self, chunk: int, first: int = 0) -> Iterator[tuple[int, int]]:
        for start in range(first, self.size, chunk):
            yield start, min(start + chunk, self.size)

    def _add(self, piece: Array, start: int) -> None:
        """Elements from `start` on."""
        count = max(0, min(piece.size, self._arrays[0].size - start))
        if count:
            sum_into(piece[:count], [array[start : start + count] for array in self._arrays], self._factors)
        piece[count:] = 0
