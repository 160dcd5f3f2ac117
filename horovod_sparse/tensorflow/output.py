"""Dense sums of a bucket, in memory that TensorFlow takes without a copy and that is used again."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_sparse.kernels import apply_scaled_sum, clear_at
from horovod_sparse.kernels.layout import native_bits

__all__ = ["DenseOutput"]

#: TensorFlow copies arrays that are not aligned so
_ALIGNMENT = 64
#: scattered elements above this share of the memory are cleared faster by clearing all of it
_SPARSE_SHARE = 1 / 8
#: memories that are kept: eager loops hold the last step's gradients while they compute the next ones
_NUM_KEPT = 2


class _Memory:
    def __init__(self, num_elements: int, dtype: np.dtype[Any]) -> None:
        raw = np.zeros(num_elements * dtype.itemsize + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        self.flat = raw[start : start + num_elements * dtype.itemsize].view(dtype)
        self.scattered: np.ndarray = np.empty(0, np.int32)
        self.lent: list[weakref.ref[np.ndarray]] = []

    @property
    def is_free(self) -> bool:
        return not any(ref() is not None for ref in self.lent)

    def clear(self) -> None:
        if self.scattered.size > _SPARSE_SHARE * self.flat.size:
            self.flat[...] = 0
        elif self.scattered.size:
            clear_at(self.flat, self.scattered)


class DenseOutput:
    """Gives out the dense gradients of a bucket's parameters; writes k elements, not n.

    TensorFlow takes an aligned NumPy array as a tensor's memory, never writes to it, and lets go of
    the array with the last tensor. Memory whose arrays are all let go of is used for a later step,
    where only the places that hold something have to be cleared.

    Args:
        shapes: of the parameters, in bucket order.
        dtype: of the gradients, as NumPy (or ml_dtypes) knows it.

    Example:
        >>> output = DenseOutput([(2,), (1, 3)], np.dtype(np.float32))
        >>> arrays, num_union = output.write(np.array([1, 4], np.int32), np.ones(2, np.float32), 0.5)
        >>> [array.tolist() for array in arrays], num_union
        ([[0.0, 0.5], [[0.0, 0.0, 0.5]]], 2)
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> None:
        self.shapes, self.dtype = [tuple(shape) for shape in shapes], dtype
        self._lengths = [math.prod(shape) for shape in self.shapes]
        self._starts = np.cumsum([0, *self._lengths[:-1]])
        per_line = _ALIGNMENT // dtype.itemsize
        padded = [-(-length // per_line) * per_line for length in self._lengths]
        self._places = np.cumsum([0, *padded[:-1]])
        self._num_elements = int(sum(padded))
        self._shifts = (self._places - self._starts).astype(np.int32)
        self._is_shifted = bool(self._shifts.any())
        self._computable = _computable(dtype)
        self._memories: list[_Memory] = []

    def write(self, indices: np.ndarray, values: np.ndarray, scale: float) -> tuple[list[np.ndarray], int]:
        """Scatters a sum into zeros.

        Args:
            indices: int32 [k], within the bucket; repeated ones add up.
            values: float32 or float64 [k].
            scale: of the sums.

        Returns:
            One array per parameter, and how many different elements were written.
        """
        memory = self._free_memory()
        where = indices
        if self._is_shifted:
            where = indices + self._shifts[np.searchsorted(self._starts, indices, side="right") - 1]
        memory.scattered = where
        num_union = apply_scaled_sum(native_bits(memory.flat).view(self._computable), where, values, scale)
        arrays = [
            memory.flat[place : place + length].reshape(shape)
            for place, length, shape in zip(self._places, self._lengths, self.shapes, strict=True)
        ]
        memory.lent = [weakref.ref(array) for array in arrays]
        return arrays, num_union

    def _free_memory(self) -> _Memory:
        for memory in self._memories:
            if memory.is_free:
                memory.clear()
                return memory
        memory = _Memory(self._num_elements, self.dtype)
        self._memories = [*self._memories[-(_NUM_KEPT - 1) :], memory]
        return memory


def _computable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that scattering knows: bfloat16 as its bits."""
    return np.dtype(np.uint16) if dtype.name == "bfloat16" else dtype
