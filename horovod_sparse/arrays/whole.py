"""A gradient of which all elements are sent, so that no residual remains."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays.accumulator import Accumulator
from horovod_sparse.arrays.gradients import GradientParts, fold_dtype
from horovod_sparse.arrays.protocol import FoldReport, FoldRule, Values
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host.scatter import widen

#: elements that are copied and looked at while they are in the cache
_CHUNK = 1 << 16
#: a position travels as three numbers below 2048, which float16 holds exactly: so many bits each
HEALTH_NUMBERS, DIGIT_BITS = 3, 11


class WholeGradient(Accumulator):
    """Replaces the accumulator of a bucket with `Dense`: holds one step's gradient, and no residual.

    A residual from before (the parameters were sparse) is added to the next gradient. The gradient of a step
    that is abandoned is dropped, as Horovod would. Sparsifiers cannot select from it.

    Args:
        num_elements: n.
        dtype: of the gradients.

    Example:
        >>> whole = WholeGradient(2)
        >>> whole.fold(np.array([1.0, 2.0], np.float32)).first_nonfinite
        -1
        >>> whole.allreduce_buffer(rank=0, size=1).tolist()
        [1.0, 2.0, 0.0, 0.0, 0.0]
    """

    def __init__(self, num_elements: int, dtype: Any = "float32") -> None:
        self.num_elements, self.dtype = num_elements, np.dtype(fold_dtype(dtype))
        self.companions = ()
        self.step, self.report = 0, FoldReport()
        #: this step's gradient, and a loaded residual to add to it
        self._gradient: Any = None
        self._carried: Any = None

    @property
    def square_norm(self) -> float:
        """0, since there is no residual."""
        return 0.0

    def fold(self, gradient: Any, rule: FoldRule | None = None) -> FoldReport:
        """Keeps a reference to the gradient, which `allreduce_buffer` sends; ignores the rule."""
        kept = gradient if isinstance(gradient, GradientParts) else GradientParts([np.asarray(gradient)])
        if kept.size != self.num_elements:
            raise ArgumentError("gradient", kept.size, f"an array of {self.num_elements} elements")
        self._gradient = kept
        self.report = FoldReport(step=self.step)
        return self.report

    def abandon(self) -> None:
        self._gradient = None

    def drop(self, gradient: Any) -> None:
        """Does nothing: no residual holds the gradient, which `abandon` has released."""

    def accept(self) -> None:
        self._gradient = self._carried = None

    def host_arrays(self) -> tuple[Values, ...]:
        return () if self._carried is None else (self._carried,)

    def assign_arrays(self, arrays: Any) -> None:
        (values,) = arrays
        self._carried = values if values.any() else None

    def allreduce_buffer(self, rank: int, size: int) -> Any:
        """Returns the array to sum over ranks: gradient, then numbers that say where it has NaN or Inf."""
        n = self.num_elements
        buffer = np.empty(n + HEALTH_NUMBERS * size, self.dtype)
        own, health = buffer[:n], buffer[n:]
        health[:] = 0
        first = self._copy_and_find_nonfinite(own)
        if self.report.first_nonfinite == n:  # this rank cancels the step
            first = n
        position = first + 1
        digits = [position >> 2 * DIGIT_BITS, position >> DIGIT_BITS, position]
        health.reshape(HEALTH_NUMBERS, size)[:, rank] = np.array(digits) % (1 << DIGIT_BITS)
        return buffer

    def _copy_and_find_nonfinite(self, own: NDArray[Any]) -> int:
        """Copies the gradient into `own`; returns the index of its first NaN or Inf, or -1."""
        first = -1
        for start, piece in self._gradient.pieces(_CHUNK):
            for begin in range(0, piece.size, _CHUNK):
                part = piece[begin : begin + _CHUNK]
                at = start + begin
                values = own[at : at + part.size]
                values[:] = widen(part)
                if self._carried is not None:
                    values += self._carried[at : at + part.size]
                if first < 0:
                    with np.errstate(over="ignore", invalid="ignore"):
                        square = float(np.dot(values, values))
                    if not math.isfinite(square) and not (finite := np.isfinite(values)).all():
                        first = at + int(np.argmin(finite))
        return first

    def decode_sum(self, total: Any, size: int) -> tuple[Any, dict[int, int], float]:
        """Returns the summed gradient, each failed rank's index of NaN or Inf, and the largest magnitude."""
        n = self.num_elements
        values = np.asarray(total[:n]).astype(self.dtype, copy=False)
        return values, positions_by_rank(np.asarray(total[n:]), size), largest_magnitude(values)


def positions_by_rank(health: NDArray[Any], size: int) -> dict[int, int]:
    """Returns {failed rank: index of its NaN or Inf}, from the numbers summed behind a gradient.

    Example:
        >>> positions_by_rank(np.array([0, 0, 0, 1, 0, 2], np.float32), 2)
        {1: 2049}
    """
    high, middle, low = health.reshape(HEALTH_NUMBERS, size).astype(np.int64)
    positions = (high << 2 * DIGIT_BITS) + (middle << DIGIT_BITS) + low
    return {int(rank): int(positions[rank]) - 1 for rank in np.flatnonzero(positions)}


def largest_magnitude(values: NDArray[Any]) -> float:
    """Returns the largest magnitude, or NaN if one of the values is NaN.

    Example:
        >>> largest_magnitude(np.array([1.0, -3.0]))
        3.0
    """
    tops = [0.0]
    for start in range(0, values.size, _CHUNK):
        chunk = values[start : start + _CHUNK]
        tops += float(chunk.max()), -float(chunk.min())
    return float(np.max(tops))
