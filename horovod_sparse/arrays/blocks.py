"""The block maxima of one accumulator: made by the fold, kept usable while elements change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays.protocol import Indices
from horovod_sparse.kernels import Layout, host_maxima
from horovod_sparse.kernels.layout import bits_dtype

__all__ = ["BlockMaxima"]

Array = NDArray[Any]


class BlockMaxima:
    """Magnitude bits of the largest element of every block, made when they are first needed.

    Args:
        values: float32 or float64, shape (n,).
        layout: of the blocks.
    """

    def __init__(self, values: Array, layout: Layout) -> None:
        self._values, self._layout = values, layout
        self._array = np.empty(0, bits_dtype(values.dtype))
        self._known = False

    def to_be_written(self) -> Array:
        """Memory for all maxima, which the caller fills."""
        if self._array.size != self._layout.num_blocks:
            self._array = np.empty(self._layout.num_blocks, self._array.dtype)
        self._known = True
        return self._array

    def bounds(self) -> Array:
        """Upper bounds: exact, but for what was cleared since."""
        if not self._known:
            host_maxima.scan_maxima(self._values, self.to_be_written(), self._layout.block)
        return self._array

    def exact(self, changed: Iterable[Indices]) -> Array:
        """Exact maxima.

        Args:
            changed: the places that changed since they were exact last.

        Returns:
            shape (num_blocks,).
        """
        maxima = self.bounds()
        for indices in changed:
            host_maxima.refresh_maxima(self._values, maxima, self._layout.block, indices)
        return maxima

    def grew(self, indices: Indices) -> None:
        """Makes them upper bounds again after elements may have grown."""
        if self._known:
            host_maxima.raise_maxima(self._values, self._array, self._layout.block, indices)

    def forget(self) -> None:
        """All values were replaced."""
        self._known = False
