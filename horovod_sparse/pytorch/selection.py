"""Looking for large magnitudes in a tensor: block maxima, and what the host is told."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_sparse.arrays.protocol import Indices, Moments, Values
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.layout import Layout, bits_of, float_of
from horovod_sparse.pytorch.journal import Journal
from horovod_sparse.pytorch.plain import int_type
from horovod_sparse.pytorch.transfer import PendingCopy, to_host

# Room for indices that is always there; a copy of 16 KB takes no longer than one of a word.
_ROOM = 4096


class Selection:
    """Selects by magnitude; each call makes the host wait for the device once.

    Args:
        kernels: what carries it out.
        values: n elements.
        layout: of their blocks.
        journal: of changes to the values.
        expected: how many a threshold will find, about.
    """

    def __init__(
        self, kernels: ModuleType, values: torch.Tensor, layout: Layout, journal: Journal, expected: int
    ) -> None:
        self._kernels, self._values, self._layout, self._journal = kernels, values, layout, journal
        # Count and indices come in one copy if there is room for all: twice as many as last time.
        self._room = max(_ROOM, 2 * expected)
        self.maxima: torch.Tensor | None = None

    @property
    def _dtype(self) -> type[np.floating]:
        return np.float64 if self._values.dtype == torch.float64 else np.float32

    def new_maxima(self) -> torch.Tensor:
        """Memory for the block maxima, which a fold fills."""
        if self.maxima is None:
            kind = int_type(self._values.dtype)
            self.maxima = torch.empty(self._layout.num_blocks, dtype=kind, device=self._values.device)
        return self.maxima

    def _bounds(self) -> torch.Tensor:
        """Upper bounds of the block maxima."""
        if self.maxima is None:
            self._kernels.scan_maxima(self._values, self.new_maxima(), self._layout)
        return self.new_maxima()

    def _exact_maxima(self) -> torch.Tensor:
        maxima = self._bounds()
        self._journal.refresh(maxima, self._layout)
        return maxima

    def largest(self, num_selected: int, start: int, stop: int | None) -> Indices:
        """See `Accumulator.largest`."""
        start, stop = self._layout.window(start, stop)
        if num_selected < 0:
            raise ArgumentError("num_selected", num_selected, "0 or more")
        if num_selected >= stop - start:
            return np.arange(start, stop, dtype=np.int32)
        if num_selected == 0:
            return np.empty(0, np.int32)
        maxima = self._exact_maxima()
        for dense in (False, True):
            report, found = self._kernels.largest(
                self._values, maxima, self._layout, num_selected, start, stop, dense
            )
            (bits, overflow), indices = PendingCopy(report, found).arrays()
            # Where fewer than k are not 0, zeros are selected too, and the block maxima do not say where.
            if bits and not overflow:
                break
        return indices

    def kth_magnitude(self, k: int, start: int, stop: int | None) -> float:
        """See `Accumulator.kth_magnitude`."""
        start, stop = self._layout.window(start, stop)
        if not 1 <= k <= stop - start:
            raise ArgumentError("k", k, f"a rank from 1 to {stop - start}, the elements of the window")
        maxima = self._exact_maxima()
        for dense in (False, True):
            report = self._kernels.kth(self._values, maxima, self._layout, k, start, stop, dense)
            bits, overflow = to_host(report)
            if not overflow:
                break
        return float_of(int(bits), self._dtype)

    def at_least(self, threshold: float, start: int, stop: int | None) -> Indices:
        """See `Accumulator.at_least`."""
        start, stop = self._layout.window(start, stop)
        bits = int(bits_of(threshold, self._dtype))
        if start == stop:
            return np.empty(0, np.int32)
        while True:
            room = min(self._room, stop - start)
            found = self._kernels.at_least(
                self._values, self._bounds(), self._layout, bits, start, stop, room
            )
            (count,), indices = PendingCopy(*found).arrays()
            self._room = max(_ROOM, 2 * int(count))
            if count <= room:
                return indices[:count]

    def count_at_least(self, thresholds: Any) -> NDArray[np.int64]:
        """See `Accumulator.count_at_least`."""
        bits = [int(bits_of(float(threshold), self._dtype)) for threshold in thresholds]
        if not self._layout.num_elements:
            return np.zeros(len(bits), np.int64)
        counts = self._kernels.count_at_least(self._values, self._bounds(), self._layout, bits)
        return to_host(counts)

    def moments(self, threshold: float) -> Moments:
        """See `Accumulator.moments`."""
        sums = self._kernels.moments(self._values, int(bits_of(threshold, self._dtype)))
        count, total, squares, logarithms = (float(number) for number in to_host(sums))
        return Moments(int(count), total, squares, logarithms)

    def sample_magnitudes(self, stride: int, offset: int) -> Values:
        """See `Accumulator.sample_magnitudes`."""
        if stride < 1 or offset < 0:
            raise ArgumentError("stride, offset", (stride, offset), "a stride from 1, an offset from 0")
        return to_host(self._values[offset::stride].abs())
