"""The accumulator in host memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays.clipping import clip_factor, scaled, take_out
from horovod_sparse.arrays.gradients import (
    GradientParts,
    accumulating,
    checked_factors,
    checked_gradient,
    pieces,
    residual_memory,
)
from horovod_sparse.arrays.protocol import FoldReport, Indices, Moments, Values
from horovod_sparse.arrays.summed import SummedParts
from horovod_sparse.checks import check_density
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host import fold as folding
from horovod_sparse.kernels.host import maxima as block_maxima
from horovod_sparse.kernels.host import quantize, scatter, select, statistics
from horovod_sparse.kernels.host.scatter import checked, compiled_for, wide
from horovod_sparse.kernels.layout import Layout, bits_dtype, bits_of, block_size
from horovod_sparse.kernels.quantization import Quantization

Array = NDArray[Any]

# Elements whose squares are added up at once.
_SQUARED = 8192


class _Change(NamedTuple):
    indices: Indices
    olds: tuple[Values, ...]


class Journal:
    """The changes of single elements since the last fold, in k-sized memory.

    Args:
        arrays: what changes together, each of shape (n,) and of one type.
    """

    def __init__(self, arrays: tuple[NDArray[Any], ...]) -> None:
        self._arrays = arrays
        self._changes: list[_Change] = []
        self._seen = 0

    def remember(self, indices: Indices) -> tuple[Values, ...]:
        """Notes, and returns, what stands at checked places of each array, just before it is changed."""
        olds = tuple(scatter.taken(array, indices) for array in self._arrays)
        # A copy: the caller may reuse its array, and the journal must not change with it.
        self._changes.append(_Change(indices.copy(), olds))
        return self._changes[-1].olds

    def unseen(self) -> Iterator[Indices]:
        """The places of all changes that no earlier call has given out."""
        first, self._seen = self._seen, len(self._changes)
        for change in self._changes[first:]:
            yield change.indices

    def undo(self) -> list[Indices]:
        """Restores every array bit for bit, the last change first; returns the places, and forgets."""
        for change in reversed(self._changes):
            for array, old in zip(self._arrays, change.olds, strict=True):
                scatter.put_at(array, change.indices, old)
        places = [change.indices for change in self._changes]
        self.forget()
        return places

    def forget(self) -> None:
        """Drops everything: what changed stays changed."""
        self._changes.clear()
        self._seen = 0


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
            block_maxima.scan_maxima(self._values, self.to_be_written(), self._layout.block)
        return self._array

    def exact(self, changed: Iterable[Indices]) -> Array:
        """Exact maxima, given the places that changed since they were exact last."""
        maxima = self.bounds()
        for indices in changed:
            block_maxima.refresh_maxima(self._values, maxima, self._layout.block, indices)
        return maxima

    def grew(self, indices: Indices) -> None:
        """Makes them upper bounds again after elements may have grown."""
        if self._known:
            block_maxima.raise_maxima(self._values, self._array, self._layout.block, indices)

    def forget(self) -> None:
        """All values were replaced."""
        self._known = False


class HostAccumulator:
    """Residual plus gradient of one bucket, in NumPy memory; implements `Accumulator`.

    Args:
        num_elements: n.
        dtype: of the gradients; the accumulator is float64 for float64, else float32.
        density: kept fraction that selections will have, in (0, 1]; it decides the block size.
        companions: how many arrays of n elements are kept beside the values. They are cleared with them
            (the velocity of momentum correction), or the first follows them (what a low-pass filter
            sums up): each change of a value is one of its own, too.
        memory: the residual's own memory, shape (n,), of the accumulator's type; its values stay, and
            nobody else may write to it from now on. None: new, zeros.

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
        self,
        num_elements: int,
        dtype: Any = "float32",
        *,
        density: float = 0.001,
        companions: int = 0,
        memory: Array | None = None,
    ) -> None:
        check_density("density", density, "a number in (0, 1]")
        self._layout = Layout(int(num_elements), block_size(density))
        self._values = residual_memory(self._layout.num_elements, accumulating(dtype), memory)
        self._companions = tuple(np.zeros_like(self._values) for _ in range(companions))
        self._cleared = (self._values, *self._companions)
        # what is held back: the values, or the companion that follows them
        self._held = self._values
        self._maxima = BlockMaxima(self._values, self._layout)
        self._journal = Journal((self._values, *self._companions))
        #: of the last fold
        self.report = FoldReport()
        self.step = 0
        # words that have left the values, but are still in them
        self._sent: tuple[Quantization, NDArray[np.int32]] | None = None
        # values, and what followed them, before words left both
        self._before: tuple[Array, Array] | None = None
        # of the last fold: the gradient's weight in the values, the velocity it went into, its norm's limit
        self._folded: tuple[float, Array | None, float | None] = 1.0, None, None
        self._square_norm = float(folding.squares_of(memory, 0, num_elements)) if memory is not None else 0.0

    @property
    def num_elements(self) -> int:
        """n, the number of elements."""
        return self._layout.num_elements

    @property
    def dtype(self) -> np.dtype[Any]:
        """float64 or float32."""
        return self._values.dtype

    @property
    def square_norm(self) -> float:
        """Sum of squares of what is held back now; see `Accumulator.square_norm`."""
        return self._square_norm

    @property
    def companions(self) -> tuple[Array, ...]:
        """Arrays of n elements that are cleared with the values, or follow them; restored with them."""
        return self._companions

    def fold(
        self,
        gradient: Any,
        *,
        decay: float = 1.0,
        momentum: float | None = None,
        nesterov: bool = False,
        masking: bool = True,
        keep_residual: bool = True,
        clip_norm: float | None = None,
        low_pass: float | None = None,
    ) -> FoldReport:
        """Values = decay * values + gradient, with what a feedback adds; see `Accumulator.fold`.

        bfloat16 may come as its bits, in uint16.
        """
        follows, beside = low_pass is not None, momentum is not None or low_pass is not None
        velocity = self._companions[0] if beside and self._companions else None
        factors = checked_factors(
            self.dtype, decay * keep_residual, momentum, nesterov, velocity is not None, low_pass
        )
        array = checked_gradient(gradient, self.num_elements, self.dtype)
        if keep_residual or follows:
            self._settle()
        self._sent = self._before = None
        self._journal.forget()
        self._cleared = (self._values, *(self._companions if masking and not follows else ()))
        held = self._values if velocity is None or not follows else velocity
        if held is not self._held:  # what was held back stands elsewhere until now, or has been loaded
            self._held, self._square_norm = held, self._squares_of(held)
        parts: Iterable[tuple[int, Any]] = pieces(array, 1024 * self._layout.block, self._layout.block)
        if clip_norm is not None:
            parts = scaled(parts, clip_factor(array, clip_norm), keep=isinstance(array, GradientParts))
        elif isinstance(array, SummedParts) and velocity is None:
            parts = array.pairs(self._layout.block)
        folded = folding.fold(
            self._values,
            parts,
            self._maxima.to_be_written(),
            self._layout,
            factors,
            velocity,
            keep_gradient=isinstance(array, GradientParts),
        )
        weight = 1.0 if velocity is None else float(factors[2] + factors[3])
        self._folded = weight, velocity, clip_norm
        carried = float(factors[1 if follows else 0]) ** 2 * self._square_norm
        self._square_norm = self._squares_of(held) if follows else folded.square_norm
        self._norm_at_start = self._square_norm
        self.report = FoldReport(
            folded.num_nonfinite, folded.first_nonfinite, folded.square_norm, carried, self.step
        )
        return self.report

    def refuse(self) -> None:
        """Lets the report of the last fold say that this rank refuses the step."""
        self.report = dataclasses.replace(self.report, first_nonfinite=self.num_elements)

    def heal(self) -> None:
        """Lets the report of the last fold say that this rank is well; see `Accumulator.heal`."""
        self.report = dataclasses.replace(self.report, num_nonfinite=0, first_nonfinite=-1)

    def _settle(self) -> None:
        """Takes away what `subtract` was told: it cannot be abandoned any more."""
        if self._sent is not None:
            code, words = self._sent
            self._sent = None
            quantize.take_away(self._values, words, code, self._values)
            self._maxima.forget()
            self._journal.forget()

    def _less_sent(self, array: Array) -> Array:
        """An array without what has left it; a view where nothing has."""
        if self._sent is None:
            return array.view()
        left = np.empty_like(array)
        quantize.take_away(array, self._sent[1], self._sent[0], left)
        return left

    def _exact_maxima(self) -> Array:
        self._settle()
        # Cleared elements leave upper bounds; they are made exact only when that is needed.
        return self._maxima.exact(self._journal.unseen())

    def largest(self, num_selected: int, start: int = 0, stop: int | None = None) -> Indices:
        """Exactly the `num_selected` largest magnitudes in [start, stop); ties go to the lowest index."""
        return select.largest(self._values, self._exact_maxima(), self._layout, num_selected, start, stop)

    def kth_magnitude(self, k: int, start: int = 0, stop: int | None = None) -> float:
        """Exact k-th largest magnitude (k from 1) in [start, stop)."""
        return select.kth_magnitude(self._values, self._exact_maxima(), self._layout, k, start, stop)

    def at_least(self, threshold: float, start: int = 0, stop: int | None = None) -> Indices:
        """All positions in [start, stop) whose magnitude is >= threshold and not 0."""
        self._settle()
        return select.at_least(self._values, self._maxima.bounds(), self._layout, threshold, start, stop)

    def count_at_least(self, thresholds: Any) -> NDArray[np.int64]:
        """How many magnitudes are >= each threshold and not 0, for several thresholds in one read."""
        self._settle()
        keys = np.array([bits_of(float(t), self.dtype) for t in thresholds], bits_dtype(self.dtype))
        counts = np.zeros(keys.size, np.int64)
        statistics.count_at_least(self._values, self._maxima.bounds(), self._layout.block, keys, counts)
        return counts

    def moments(self, threshold: float = 0.0) -> Moments:
        """Moments of the magnitudes that are >= threshold and not 0, in one read."""
        self._settle()
        out = np.zeros(4)
        statistics.moments_at_least(self._values, bits_of(threshold, self.dtype), out)
        return Moments(int(out[0]), float(out[1]), float(out[2]), float(out[3]))

    def sample_magnitudes(self, stride: int, offset: int = 0) -> Values:
        """Every stride-th magnitude from offset on."""
        self._settle()
        if stride < 1 or offset < 0:
            raise ArgumentError("stride, offset", (stride, offset), "a stride from 1, an offset from 0")
        return np.abs(self._values[offset::stride])

    def take(self, indices: Indices) -> Values:
        """The values there, as a fresh array."""
        self._settle()
        return scatter.take(self._values, indices)

    def clear(self, indices: Indices) -> None:
        """Sets the values there, and (with masking) the companions', to 0; a companion may follow instead."""
        self._settle()
        where = checked(indices, self.num_elements)
        olds = self._journal.remember(where)
        for array in self._cleared:
            scatter.zero_at(array, where)
        if self._held is not self._values:
            self._follow(where, -olds[0])
            whole = where.size == self.num_elements
            self._square_norm = self._squares_of(self._held) if whole else self._renormed(where, olds)
        elif where.size < self.num_elements:
            self._square_norm = max(0.0, self._square_norm - _squares(olds[0]))
        else:  # all of them: 0 exactly, not the rounding of the fold's sum
            self._square_norm = 0.0

    def add(self, indices: Indices, values: Values) -> None:
        """Adds to the values there; what would not stay finite adds nothing. Indices are unique."""
        self._settle()
        where = checked(indices, self.num_elements)
        new = compiled_for(values, self.dtype)
        if new.size != where.size:
            raise ArgumentError("values", new.size, f"one for each of the {where.size} indices")
        olds = self._journal.remember(where)
        with np.errstate(over="ignore", invalid="ignore"):
            finite = np.isfinite(olds[0] + new)
            if self._held is not self._values:
                finite &= np.isfinite(olds[1] + new)
        new = new if finite.all() else np.where(finite, new, new.dtype.type(0))
        scatter.add_at(self._values, where, new)
        self._follow(where, new)
        self._square_norm = self._renormed(where, olds)
        self._maxima.grew(where)

    def put(self, indices: Indices, values: Values) -> None:
        """Exactly these finite values there; companions stay, or follow. Indices are unique."""
        self._settle()
        where = checked(indices, self.num_elements)
        new = compiled_for(values, self.dtype)
        if new.size != where.size:
            raise ArgumentError("values", new.size, f"one for each of the {where.size} indices")
        olds = self._journal.remember(where)
        scatter.put_at(self._values, where, new)
        # one after the other: the difference of two large values need not be finite
        self._follow(where, -olds[0])
        self._follow(where, new)
        self._square_norm = self._renormed(where, olds)
        self._maxima.grew(where)

    def mask(self, indices: Indices) -> None:
        """Sets the companions there to 0, where there is masking; the values stay."""
        if len(self._cleared) > 1:
            where = checked(indices, self.num_elements)
            self._journal.remember(where)
            for companion in self._companions:
                scatter.zero_at(companion, where)

    def quantize(self, code: Quantization, key: int, words: NDArray[np.int32]) -> float:
        """Writes all values as codes of few bits; see `Accumulator.quantize`."""
        self._settle()
        known = self._held is self._values
        squares = self._square_norm if known else self._squares_of(self._values)
        return quantize.encode(self._values, code, key, words, squares)

    def subtract(self, code: Quantization, words: NDArray[np.int32], left: float | None = None) -> None:
        """What these words stand for leaves all values; see `Accumulator.subtract`."""
        self._settle()
        if self._held is self._values:
            self._sent = code, words
            self._square_norm = self._squares_of(self._less_sent(self._values)) if left is None else left
            return
        # companions are at hand, so they have to be right at once
        self._before = self._values.copy(), self._held.copy()
        for array in (self._values, self._held):
            quantize.take_away(array, words, code, array)
        self._maxima.forget()
        self._journal.forget()
        self._square_norm = self._squares_of(self._held)

    def _follow(self, where: Indices, change: Values) -> None:
        if self._held is not self._values:
            # not `add_at`, to which a zero's sign means something
            scatter.put_at(self._held, where, scatter.taken(self._held, where) + change)

    def _renormed(self, where: Indices, olds: tuple[Values, ...]) -> float:
        # the first two of the journal's arrays: the values, and the companion that follows them
        old = olds[0] if self._held is self._values else olds[1]
        return max(0.0, self._square_norm - _squares(old)) + _squares(scatter.taken(self._held, where))

    def _squares_of(self, array: Array) -> float:
        # by parts that BLAS adds up in one thread and in cache, each exact enough: twice as fast
        total = 0.0
        with np.errstate(over="ignore"):
            for start in range(0, array.size, _SQUARED):
                part = array[start : start + _SQUARED]
                square = float(np.dot(part, part))
                if not 1e-30 < square < math.inf:
                    square = float(folding.squares_of(part, 0, part.size))
                total += square
        return total

    def abandon(self) -> None:
        """Takes back every change since the last fold, bit for bit."""
        if self._sent is not None or self._before is not None:
            if self._before is not None:
                self._values[...], self._held[...] = self._before
                self._maxima.forget()
            self._sent = self._before = None
            self._square_norm = self._norm_at_start
        places = self._journal.undo()
        self._maxima.exact(places)
        if places:
            self._square_norm = self._norm_at_start

    def drop(self, gradient: Any) -> None:
        """Takes the last fold's gradient out again; see `Accumulator.drop`."""
        array = checked_gradient(gradient, self.num_elements, self.dtype)
        weight, velocity, clip_norm = self._folded
        parts = pieces(array, 1024 * self._layout.block, self._layout.block)
        if clip_norm is not None:
            parts = scaled(parts, clip_factor(array, clip_norm), keep=True)
        for start, piece in parts:
            step = wide(piece).astype(self.dtype)
            take_out(self._values[start : start + piece.size], weight * step)
            if velocity is not None:
                take_out(velocity[start : start + piece.size], step)
        self._square_norm = self._squares_of(self._held)
        self._norm_at_start = self._square_norm
        self._maxima.forget()
        self._journal.forget()

    def values(self) -> Values:
        """All n values: a view, to be read only (use `assign` to change them)."""
        view = self._less_sent(self._values)
        view.flags.writeable = False
        return view

    def residual(self) -> Values:
        """What is held back, all n elements; see `Accumulator.residual`."""
        view = self._held.view() if self._sent is None else self._less_sent(self._held)
        view.flags.writeable = False
        return view

    def assign(self, values: Values) -> None:
        """Replaces all n values (loading a checkpoint). Companions are replaced after it, in place.

        Args:
            values: n elements of any float type, in any shape.

        Raises:
            ArgumentError: another number of elements, or NaN or Inf among them.
        """
        with np.errstate(over="ignore"):
            new = np.asarray(values).astype(self.dtype, copy=False)
        if new.size != self.num_elements:
            raise ArgumentError("values", new.shape, f"an array of {self.num_elements} elements")
        if not np.isfinite(new).all():
            raise ArgumentError("values", "NaN or Inf", "finite numbers")
        self._values[...] = new.reshape(-1)
        self._sent = self._before = None
        self._held, self._square_norm = self._values, self._squares_of(self._values)
        self._norm_at_start = self._square_norm
        self._maxima.forget()
        self._journal.forget()


def _squares(values: Values) -> float:
    """Sum of squares in float64, of k values."""
    wider = values.astype(np.float64)
    return float(np.dot(wider, wider))
