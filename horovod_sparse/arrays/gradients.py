"""Gradients in the forms that a host accumulator folds: joined arrays, weighted sums, clipped, scaled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays.protocol import FoldRule
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host.scatter import narrow, native_bits, widen

Array = NDArray[Any]

#: elements from which an array is read in place, where its start and end are at hand of whole blocks
_LARGE = 1 << 16
#: elements that are widened for a norm at a time: they stay in the cache between their uses
_WIDENED = 1 << 16


class Pair(NamedTuple):
    """A piece of a gradient as ``factors[0] * one + factors[1] * other``, computed in the fold."""

    one: Array
    other: Array | None
    factors: Array


class GradientParts:
    """A bucket's gradient as the arrays of its parameters, one after another; a fold only reads them.

    Large arrays are read in place; small ones, and the ends of large ones, are gathered in a buffer that
    stays in the cache.

    Args:
        arrays: of one type: float32, float64, float16, or bfloat16 (its bits as uint16, or from ml_dtypes);
            any shapes. What is not contiguous is copied.

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
            raise ArgumentError("gradient", [array.dtype.name for array in given], "arrays of one dtype")
        self.dtype = given[0].dtype
        plain = self.dtype in (np.float32, np.float64)
        self._flat = [array.reshape(-1) if plain else native_bits(array) for array in given]
        self.size = sum(array.size for array in self._flat)

    def joined(self, dtype: np.dtype[Any]) -> Array:
        """Returns all elements as one read-only array of float32 or float64, without a copy if possible.

        Example:
            >>> GradientParts([np.array([0x3F80], np.uint16)]).joined(np.dtype(np.float32))
            array([1.], dtype=float32)
        """
        arrays = [widen(array).astype(dtype, copy=False) for array in self._flat]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def pieces(self, size: int, block: int = 1) -> Iterator[tuple[int, Array]]:
        """Yields read-only pieces of the gradient, each with its position; all but the last are whole blocks.

        Some are copied to a buffer of `size` elements that is used again: read one before the next.
        """
        if len(self._flat) == 1:
            return iter([(0, self._flat[0])])
        if self.size <= min(size, _LARGE):
            return iter([(0, np.concatenate(self._flat))])
        return joined_pieces(self._flat, self._flat[0].dtype, min(size, self.size), block)


def joined_pieces(
    arrays: Iterable[Array], dtype: np.dtype[Any], size: int, block: int
) -> Iterator[tuple[int, Array]]:
    """Yields (position, piece) of consecutive arrays; joins small ones in a buffer of `size`, used again."""
    buffer = np.empty(size, dtype)
    start, filled, large = 0, 0, max(_LARGE, block)
    for array in arrays:
        taken = 0
        while taken < array.size:
            if array.size - taken >= large and filled % block == 0:
                if filled:
                    yield start, buffer[:filled]
                    start, filled = start + filled, 0
                count = (array.size - taken) // block * block
                yield start, array[taken : taken + count]
                start, taken = start + count, taken + count
                continue
            room = -filled % block if array.size - taken >= large else buffer.size - filled
            count = min(room, array.size - taken)
            buffer[filled : filled + count] = array[taken : taken + count]
            filled, taken = filled + count, taken + count
            if filled == buffer.size:
                yield start, buffer
                start, filled = start + filled, 0
    if filled:
        yield start, buffer[:filled]


class WeightedParts(GradientParts):
    """A gradient with weight decay: ``weights[0] gradient + weights[1] parameter``, computed in pieces.

    Used for own steps: the loss scale is divided out, and weight decay added, while a fold reads it.

    Args:
        gradients: arrays as for `GradientParts`.
        parameters: as many arrays of the same sizes; read only if weights[1] is not 0.
        weights: the factors of gradient and parameter.

    Example:
        >>> parts = WeightedParts([np.array([1.0, 2.0])], [np.array([4.0, 4.0])], (2.0, 0.5))
        >>> parts.joined(np.dtype(np.float64))
        array([4., 6.])
    """

    def __init__(
        self, gradients: Sequence[Array], parameters: Sequence[Array], weights: tuple[float, float]
    ) -> None:
        super().__init__(gradients)
        self._weights = weights
        self._beside = GradientParts(parameters) if weights[1] else None

    def joined(self, dtype: np.dtype[Any]) -> Array:
        return np.concatenate([piece for _, piece in self.pieces(self.size)]).astype(dtype, copy=False)

    def pieces(self, size: int, block: int = 1) -> Iterator[tuple[int, Array]]:
        for start, (one, other, (own, beside)) in self._pairs(size, block, self._weights):
            total = widen(one)
            total = total * total.dtype.type(own)
            yield start, total if other is None else total + widen(other) * total.dtype.type(beside)

    def pairs(
        self, dtype: np.dtype[Any], block: int, clip_norm: float | None = None
    ) -> Iterator[tuple[int, Pair]]:
        """Yields pieces as (position, `Pair` of gradient and parameter), the gradient clipped."""
        own, beside = self._weights
        if clip_norm is not None and own:
            own *= clip_factor(GradientParts(self._flat), clip_norm / abs(own))
        return self._pairs(1024 * block, block, np.array((own, beside), dtype))

    def _pairs(self, size: int, block: int, weights: Any) -> Iterator[tuple[int, Pair]]:
        others = None if self._beside is None else self._beside.pieces(size, block)
        for start, piece in super().pieces(size, block):
            yield start, Pair(piece, None if others is None else next(others)[1], weights)


def fold_dtype(dtype: Any) -> type[np.floating[Any]]:
    """Returns the dtype in which gradients of a dtype accumulate: float64 for float64, else float32."""
    name = str(getattr(dtype, "name", getattr(dtype, "__name__", dtype))).removeprefix("torch.")
    if name not in ("float16", "bfloat16", "uint16", "float32", "float64"):
        raise ArgumentError("dtype", dtype, "float32, float64, float16 or bfloat16")
    return np.float64 if name == "float64" else np.float32


def clip_factor(gradient: GradientParts, clip_norm: float) -> float:
    """Returns ``min(1, clip_norm / norm)``, with the norm of the finite elements."""
    norm = _finite_norm(gradient)
    return 1.0 if norm <= clip_norm else clip_norm / norm


def _finite_norm(gradient: GradientParts) -> float:
    """Returns the L2 norm of the finite elements, even where their squares overflow or underflow."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        total = sum(float(np.dot(chunk, chunk)) for chunk in _chunks(gradient))
        if 1e-30 < total < math.inf:
            return math.sqrt(total)
        tops = (np.abs(chunk).max(where=np.isfinite(chunk), initial=0.0) for chunk in _chunks(gradient))
        top = float(max(tops, default=0.0))
        if top == 0.0:
            return 0.0
        total = 0.0
        for chunk in _chunks(gradient):
            shares = np.where(np.isfinite(chunk), chunk, 0).astype(np.float64) / top
            total += float(np.dot(shares, shares))
    return top * math.sqrt(total)


def scaled(pieces: Iterable[tuple[int, Array]], factor: float) -> Iterator[tuple[int, Array]]:
    """Yields the pieces of a gradient times a factor; NaN and Inf stay."""
    if factor == 1.0:
        yield from pieces
        return
    for start, piece in pieces:
        for first in range(0, piece.size, _WIDENED):
            chunk = piece[first : first + _WIDENED]
            large = widen(chunk)
            yield start + first, narrow(large * large.dtype.type(factor), chunk.dtype)


def undo_fold(
    values: Any, companion: Any | None, gradient: Any, rule: FoldRule, factors: Any, library: Any = np
) -> None:
    """Subtracts a folded gradient from values and companion again, up to rounding; a decay is not undone.

    A second moment is restored, except where rounding had lost it beside a much larger squared gradient. All
    arrays are of one `library`, NumPy or PyTorch; `factors` are the rule's for their type.

    Example:
        >>> values, rule = np.array([3.0, 1.0, 2.0]), FoldRule()
        >>> undo_fold(values, None, np.array([1.0, np.inf, 2.0]), rule, rule.factors(values.dtype)); values
        array([2., 1., 0.])
    """
    if rule.moment is None or companion is None:
        _subtract_folded(values, (factors[2] + factors[3]) * gradient, library)
        if companion is not None:
            _subtract_folded(companion, gradient, library)
            if factors[1]:  # so small a momentum is 0 in float32
                values -= factors[3] * companion
                companion /= factors[1]
        return
    _, lasting, fresh, rate, eps, floor = factors
    with np.errstate(over="ignore", invalid="ignore"):
        square = fresh * (gradient * gradient)
        counted = library.isfinite(square)
        step = rate * gradient / (library.sqrt(companion + floor) + eps)
        _subtract_folded(values, library.where(counted, step, 0), library)
        before = (companion - square) / lasting
        companion[...] = library.where(counted, library.where(before > 0, before, 0), companion)


def projection_on(before: Any, after: Any, moment: Any, signs: Any, factors: Any, library: Any = np) -> Any:
    """Returns a gradient's projection on signs, computed from the values before and after its fold.

    Example:
        >>> factors = FoldRule(moment=0.75, count=math.inf, rate=2.0, eps=1.0).factors(np.dtype(float))
        >>> after, moment = np.array([1.0, 2.0]), np.array([4.0, 9.0])
        >>> float(projection_on(np.zeros(2), after, moment, np.array([1.0, -1.0]), factors))
        -2.5
    """
    decay, *_, rate, eps, floor = factors
    step = signs * (after - decay * before)
    return (step * (library.sqrt(moment + floor) + eps)).sum() / rate if rate else 0.0 * step.sum()


def _subtract_folded(values: Any, step: Any, library: Any) -> None:
    """Undoes a fold: subtracts its step from values in place, but not where the fold had skipped it."""
    with np.errstate(over="ignore", invalid="ignore"):
        without = values - step
        # where this overflows, the fold's sum may have overflowed too, and nothing was added
        left_out = ~library.isfinite(values + step) & (abs(without) > abs(values))
        values[...] = library.where(library.isfinite(without) & ~left_out, without, values)


def _chunks(gradient: GradientParts) -> Iterator[Array]:
    """Yields a gradient's elements in small arrays, half types as float32."""
    for _, piece in gradient.pieces(_WIDENED):
        for start in range(0, piece.size, _WIDENED):
            yield widen(piece[start : start + _WIDENED])
