"""The accumulator in host memory: NumPy's arrays, numba's kernels."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays import gradients
from horovod_sparse.arrays.accumulator import Accumulator
from horovod_sparse.arrays.protocol import FoldReport, FoldRule, Indices, Kernels, Values
from horovod_sparse.checks import check_density
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host import fold as folding
from horovod_sparse.kernels.host import kth, scatter, select
from horovod_sparse.kernels.lanes import LANES
from horovod_sparse.kernels.layout import Layout, bits_dtype, block_size
from horovod_sparse.kernels.quantization import Quantization, encode

Array = NDArray[Any]

# Elements whose squares are added up at once.
_SQUARED = 8192
# Selections of fewer elements, or of more than one in so many, are as fast without candidates.
_FEWEST, _SPARSE = 256, 32
# Bins in which the k-th largest of the candidates is looked for are 2**-12 of an exponent wide.
_FINE = 12
# In place of the count: the values have changed, so candidates are invalid.
_STALE = -2


class HostAccumulator(Accumulator):
    """An accumulator in host memory (NumPy arrays).

    Args:
        num_elements: n.
        dtype: of the gradients; the accumulator is float64 for float64, else float32.
        density: kept fraction that selections will have, in (0, 1]; it decides the block size.
        companions: how many arrays of n elements are kept beside the values, and cleared with them (the
            velocity of momentum correction).

    Raises:
        ArgumentError: an argument is outside what is allowed.

    Example:
        >>> accumulator = HostAccumulator(4, density=0.5)
        >>> accumulator.fold(np.array([1.0, -3.0, 0.0, 2.0], np.float32)).square_norm
        14.0
        >>> accumulator.largest(2)
        array([1, 3], dtype=int32)
    """

    def __init__(
        self, num_elements: int, dtype: Any = "float32", *, density: float = 0.001, companions: int = 0
    ) -> None:
        check_density("density", density, "a number in (0, 1]")
        layout = Layout(int(num_elements), block_size(density))
        super().__init__(HostKernels(layout, gradients.fold_dtype(dtype)), companions)


class Candidates:
    """Elements that a fold found above a bound, among which the k largest are found without another pass.

    The k-th largest of a residual changes little from step to step. So a fold notes every element that
    reaches a bound a little below the last one, while it has them in cache. If fewer than k reach the bound,
    or more than there is room for, a selection reads all n elements.

    Args:
        num_elements: n.
        dtype: of the values.
    """

    def __init__(self, num_elements: int, dtype: np.dtype[Any]) -> None:
        self._most, self._dtype, self._bits = num_elements // _SPARSE, dtype, bits_dtype(dtype)
        self._exponent = int(np.finfo(dtype).nmant)
        # a bound above all finite magnitudes: nothing is a candidate
        self._never = np.finfo(dtype).max.view(self._bits) + self._bits.type(1)
        self._next, self._room = self._never, 0
        self._bound, self._count = np.array([self._never]), np.array([_STALE, 0, 0])
        self._places, self._words = np.empty(0, np.int32), np.empty(0, self._bits)
        #: how far the next bound is below the smallest selected magnitude, in bits
        self._margin = 1 << self._exponent - 3
        self._last, self._fresh = 0, False

    def begin(self) -> tuple[Array, Array, Array, Array]:
        """Returns the arrays that a fold fills: bound, counters, indices and words of the candidates."""
        self._bound[0], self._count[:2], self._fresh = self._next, 0, True
        if self._places.size < self._room:
            self._places, self._words = np.empty(self._room, np.int32), np.empty(self._room, self._bits)
        return self._bound, self._count, self._places, self._words

    def forget(self) -> None:
        """Discards the candidates: called when values have changed since the fold that found them."""
        self._count[0], self._fresh = _STALE, False

    def kth(self, k: int) -> tuple[Any, int] | None:
        """Returns the k-th largest magnitude's bits, and how many are larger; None with fewer candidates."""
        count = int(self._count[0])
        if count < k:
            return None
        smallest, larger = kth.kth_above(
            self._words, count, k, self._bound[0], 8 * self._dtype.itemsize - 1, self._exponent - _FINE
        )
        return self._bits.type(smallest), larger

    def largest(self, k: int) -> tuple[Array, Array] | None:
        """Returns ascending indices and values of the k largest candidates, or None; sets the next bound."""
        if (known := self.kth(k)) is None:
            return None
        out, found = np.empty(k + LANES, np.int32), np.empty(k + LANES, self._bits)
        kth.copy_largest(self._places, self._words, self._count[0], known[0], k - known[1], out, found)
        self.set_next_bound(k, known[0])
        return out[:k], found[:k].view(self._dtype)

    def set_next_bound(self, k: int, smallest: Any) -> None:
        """Sets the next fold's bound from the k-th largest now; only the first call after a fold counts."""
        if not self._fresh:
            return
        self._fresh = False
        if not _FEWEST <= k <= self._most or smallest == 0:
            self._next, self._last = self._never, 0
            return
        count = int(self._count[0])
        if count == kth.FULL or self._bound[0] > self._next:  # it was raised
            self._margin = max(self._margin >> 1, 1 << self._exponent - 8)
        elif count > k + k // 2:
            self._margin -= self._margin >> 3
        elif count < k and self._last:
            self._margin = min(2 * self._margin, 1 << self._exponent - 1)
        # a residual that grows will grow by as much once more
        grown, self._last = int(smallest) - (self._last or int(smallest)), int(smallest)
        self._next = min(max(int(smallest) + grown - self._margin, 1), int(self._never))
        self._room, self._count[2] = 2 * k + 512, k


class HostKernels(Kernels):
    """Kernels for NumPy arrays, compiled by numba; sums of squares are floats."""

    # Kernels themselves: a call of every step takes no detour.
    take: Callable[..., Array] = staticmethod(scatter.taken_at)
    put: Callable[..., None] = staticmethod(scatter.put_at)
    zero: Callable[..., None] = staticmethod(scatter.zero_at)
    largest_of_each: Callable[..., tuple[Indices, Array]] = staticmethod(select.largest_of_each)
    number: Callable[..., float] = float
    float_of: Callable[..., float] = float
    to_host: Callable[..., Array] = staticmethod(np.asarray)
    checked_indices: Callable[..., Indices]
    at_least: Callable[..., Indices]

    def __init__(self, layout: Layout, kind: type[np.floating[Any]]) -> None:
        self.layout, self.dtype = layout, np.dtype(kind)
        self.checked_indices = functools.partial(scatter.checked, num_elements=layout.num_elements)
        self._candidates = Candidates(layout.num_elements, self.dtype)
        self.at_least = functools.partial(select.at_least, layout=layout)

    def zeros(self) -> Array:
        # NumPy asks for huge pages, which matters to what touches single elements far apart.
        return np.zeros(self.layout.num_elements, self.dtype)

    def _checked_gradient(self, gradient: Any) -> gradients.GradientParts:
        is_parts, n = isinstance(gradient, gradients.GradientParts), self.layout.num_elements
        parts = gradient if is_parts else gradients.GradientParts([np.asarray(gradient)])
        if parts.size != n:
            raise ArgumentError("gradient", parts.size, f"an array of {n} elements")
        if parts.dtype != self.dtype and gradients.fold_dtype(parts.dtype) != self.dtype:
            allowed = "float64" if self.dtype == np.float64 else "float32, float16 or bfloat16"
            raise ArgumentError("gradient", parts.dtype.name, allowed)
        return parts

    def fold(
        self,
        values: Array,
        companion: Array | None,
        gradient: Any,
        maxima: Array,
        rule: FoldRule,
        norm: float,
        step: int,
    ) -> tuple[FoldReport, float]:
        block, factors = self.layout.block, rule.factors(self.dtype)
        gradient = self._checked_gradient(gradient)
        parts: Iterable[tuple[int, Any]]
        if isinstance(gradient, gradients.WeightedParts):
            parts = gradient.pairs(self.dtype, block, rule.clip_norm)
        else:
            parts = self._clipped(gradient, rule)
        noted, count, first, square_norm = self._candidates.begin(), 0, -1, 0.0
        for start, piece in parts:
            one, other, weights = piece if isinstance(piece, gradients.Pair) else (piece, None, None)
            here, report = slice(start, start + one.size), np.array([0.0, -1.0, 0.0])
            tops = maxima[start // block : -(-here.stop // block)]
            held = None if companion is None else companion[here]
            velocity, moment = (held, None) if rule.moment is None else (None, held)
            noted[1][1] = start
            more = one, other, weights, tops, block, factors, report
            folding.fold_piece(values[here], velocity, moment, *more, noted)
            if first < 0 <= report[1]:
                first = start + int(report[1])
            count += int(report[0])
            square_norm += float(report[2])
        carried = float(factors[0]) ** 2 * norm
        return FoldReport(count, first, square_norm, carried, step), square_norm

    def _clipped(self, gradient: gradients.GradientParts, rule: FoldRule) -> Iterable[tuple[int, Array]]:
        parts = gradient.pieces(1024 * self.layout.block, self.layout.block)
        if rule.clip_norm is None:
            return parts
        return gradients.scaled(parts, gradients.clip_factor(gradient, rule.clip_norm))

    def with_projection(self, report: FoldReport, samples: Any, signs: Array, rule: FoldRule) -> FoldReport:
        before, after, moment = (array.astype(np.float64) for array in samples)
        projection = gradients.projection_on(before, after, moment, signs, rule.factors(self.dtype).tolist())
        return dataclasses.replace(report, projection=float(projection))

    def undo_fold(self, values: Array, companion: Array | None, gradient: Any, rule: FoldRule) -> None:
        factors = rule.factors(self.dtype)
        for start, piece in self._clipped(self._checked_gradient(gradient), rule):
            stop, step = start + piece.size, scatter.widen(piece).astype(self.dtype)
            held = None if companion is None else companion[start:stop]
            gradients.undo_fold(values[start:stop], held, step, rule, factors)

    def assign(self, values: Array, new: Any) -> None:
        with np.errstate(over="ignore"):
            new = np.asarray(new).astype(self.dtype, copy=False)
        if new.size != values.size:
            raise ArgumentError("values", new.shape, f"an array of {values.size} elements")
        if not np.isfinite(new).all():
            raise ArgumentError("values", "NaN or Inf", "finite numbers")
        values[...] = new.reshape(-1)

    def empty_maxima(self) -> Array:
        return np.empty(self.layout.num_blocks, bits_dtype(self.dtype))

    def largest(
        self, values: Array, maxima: Array, k: int, start: int, stop: int
    ) -> tuple[Indices, Array | None]:
        whole = stop - start == values.size
        if whole and (known := self._candidates.largest(k)) is not None:
            return known
        indices = select.largest(values, maxima, k, start, stop, self.layout)
        if not whole:
            return indices, None
        found = scatter.taken_at(values, indices)
        self._candidates.set_next_bound(k, np.abs(found).min().view(maxima.dtype))
        return indices, found

    def kth(self, values: Array, maxima: Array, k: int, start: int, stop: int) -> Any:
        if stop - start < values.size:
            return select.kth(values, maxima, k, start, stop, self.layout)
        known = self._candidates.kth(k)
        bits = select.kth(values, maxima, k, start, stop, self.layout) if known is None else known[0]
        self._candidates.set_next_bound(k, bits)
        return bits

    def scan_maxima(self, values: Array, maxima: Array) -> None:
        self._candidates.forget()
        folding.scan_maxima(values, maxima, self.layout.block)

    def refresh_maxima(self, values: Array, maxima: Array, where: Indices) -> None:
        self._candidates.forget()
        folding.refresh_maxima(values, maxima, self.layout.block, where)

    def sample(self, values: Array, stride: int, offset: int) -> Values:
        return np.abs(values[offset::stride])

    def from_host(self, values: Any) -> Array:
        return scatter.kernel_array(values, self.dtype)

    def view(self, values: Array) -> Values:
        return values.view()

    def add(self, values: Array, where: Indices, olds: Array, new: Array) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            finite = np.isfinite(olds + new)
        new = new if finite.all() else np.where(finite, new, new.dtype.type(0))
        scatter.add_at(values, where, new)

    def sum_of_squares(self, values: Array) -> float:
        # by parts that BLAS adds up in one thread and in cache, each exact enough: twice as fast
        total = 0.0
        with np.errstate(over="ignore"):
            for start in range(0, values.size, _SQUARED):
                part = values[start : start + _SQUARED]
                square = float(np.dot(part, part))
                if not 1e-30 < square < math.inf:
                    square = float(folding.squares_of(part, 0, part.size))
                total += square
        return total

    def updated_norm(self, norm: float, old: Array, new: Array | None = None) -> float:
        left = max(0.0, norm - self.sum_of_squares(old))
        return left if new is None else left + self.sum_of_squares(new)

    def quantize(self, values: Array, code: Quantization, key: int, words: NDArray[np.int32]) -> Array:
        return encode(values, code, key, words)
