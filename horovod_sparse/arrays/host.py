"""The accumulator in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import kernels
from horovod_sparse.arrays.protocol import FoldReport, Indices, Values
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels import host_fold, host_fold_momentum, host_maxima, host_scatter
from horovod_sparse.kernels.host_apply import checked
from horovod_sparse.kernels.layout import Layout, bits_dtype, native_bits

__all__ = ["HostAccumulator"]

Array = NDArray[Any]


@dataclass(frozen=True)
class _Change:
    """What stood at some places before they were changed."""

    indices: Indices
    values: Values
    companions: tuple[Values, ...]


class HostAccumulator:
    """Residual plus gradient of one bucket, in NumPy memory; implements `Accumulator`.

    Args:
        num_elements: n.
        dtype: of the gradients; the accumulator is float64 for float64, else float32.
        density: kept fraction that selections will have, in (0, 1]; it decides the block size.
        companions: how many arrays of n elements are kept beside the values and cleared with them
            (the velocity of momentum correction is the first).
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
        if not 0.0 < density <= 1.0:
            raise ArgumentError("density", density, "a number in (0, 1]")
        self._layout = Layout(int(num_elements), kernels.block_size(density))
        kind = _accumulating(dtype)
        if memory is not None and (
            memory.dtype != kind or memory.shape != (num_elements,) or not memory.flags.carray
        ):
            raise ArgumentError(
                "memory", (memory.dtype.name, memory.shape), f"contiguous {kind.__name__}[{num_elements}]"
            )
        # numpy asks for huge pages, which matters to what touches single elements far apart.
        self._values = np.zeros(num_elements, kind) if memory is None else memory
        self._companions = tuple(np.zeros_like(self._values) for _ in range(companions))
        self._maxima: Array | None = None
        self._journal: list[_Change] = []
        # Changes up to here are in the maxima; those after only keep them upper bounds.
        self._refreshed = 0
        self._report = FoldReport()
        self._square_norm = (
            float(host_fold.squares_of(memory, 0, num_elements)) if memory is not None else 0.0
        )

    @property
    def num_elements(self) -> int:
        """n, the number of elements."""
        return self._layout.num_elements

    @property
    def dtype(self) -> np.dtype[Any]:
        """float64 or float32."""
        return self._values.dtype

    @property
    def report(self) -> FoldReport:
        """Of the last fold."""
        return self._report

    @property
    def square_norm(self) -> float:
        """Sum of squares of the values as they are now; see `Accumulator.square_norm`."""
        return self._square_norm

    @property
    def companions(self) -> tuple[Array, ...]:
        """Arrays of n elements that are cleared and restored with the values."""
        return self._companions

    def fold(
        self,
        gradient: Any,
        *,
        decay: float = 1.0,
        momentum: float | None = None,
        nesterov: bool = False,
        keep_residual: bool = True,
    ) -> FoldReport:
        """values = decay * values + gradient; gradient = 0; block maxima. The one pass over n elements.

        Args:
            gradient: n elements in any shape and strides; float32, float16, bfloat16 (or its bits as
                uint16), or float64 if the accumulator is. Set to 0.
            decay: factor of the old values.
            momentum: if given, the first companion becomes momentum * companion + gradient, and that is
                added instead of the gradient.
            nesterov: with momentum, add gradient + momentum * companion.
            keep_residual: False forgets the old values (no error feedback).

        Returns:
            What the pass learned.

        Raises:
            ArgumentError: shape or type do not fit, or momentum without a companion.
        """
        if momentum is not None and not self._companions:
            raise ArgumentError("momentum", momentum, "None, or make the accumulator with companions=1")
        if momentum is not None and not 0.0 <= momentum <= 1.0:
            raise ArgumentError("momentum", momentum, "a number in [0, 1]")
        if not np.isfinite(decay):
            raise ArgumentError("decay", decay, "a finite number")
        kind = self.dtype.type
        kept = kind(decay if keep_residual else 0.0)
        report = np.array([0.0, -1.0, 0.0])
        if self._maxima is None:
            self._maxima = np.empty(self._layout.num_blocks, bits_dtype(self.dtype))
        self._journal.clear()
        self._refreshed = 0
        velocity = self._companions[0] if momentum is not None else None
        speed = momentum or 0.0
        factors = np.array([kept, speed, *((1.0, speed) if nesterov else (0.0, 1.0))], kind)
        block = self._layout.block
        for start, piece in self._pieces(gradient):
            stop = start + piece.size
            values = self._values[start:stop]
            maxima = self._maxima[start // block : -(-stop // block)]
            before = report[0], report[1]
            report[1] = -1.0
            if velocity is None:
                host_fold.fold_plain(values, piece, maxima, block, kept, report)
            else:
                speeds = velocity[start:stop]
                host_fold_momentum.fold_momentum(values, speeds, piece, maxima, block, factors, report)
            if before[0] > 0:
                report[1] = before[1]
            elif report[1] >= 0:
                report[1] += start
        carried = float(kept) ** 2 * self._square_norm
        self._square_norm = float(report[2])
        self._report = FoldReport(int(report[0]), int(report[1]), self._square_norm, carried)
        return self._report

    def _pieces(self, gradient: Any) -> Any:
        array = np.asarray(gradient)
        if array.size != self.num_elements:
            raise ArgumentError("gradient", array.shape, f"an array of {self.num_elements} elements")
        if (array.dtype == np.float64) != (self.dtype == np.float64):
            raise ArgumentError("gradient", array.dtype.name, f"a type that accumulates in {self.dtype.name}")
        if array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative:
            yield 0, native_bits(array)
            return
        # Chunk by chunk through a small buffer; cleared at the end, since strides may overlap.
        size = 1024 * self._layout.block
        for start in range(0, array.size, size):
            chunk = np.array(array.flat[start : start + size], array.dtype.newbyteorder("="))
            yield start, native_bits(chunk)
        array[...] = 0

    def _bounds(self) -> Array:
        """Upper bounds of the block maxima."""
        if self._maxima is None:
            self._maxima = np.empty(self._layout.num_blocks, bits_dtype(self.dtype))
            host_maxima.scan_maxima(self._values, self._maxima, self._layout.block)
        return self._maxima

    def _exact_maxima(self) -> Array:
        maxima = self._bounds()
        for change in self._journal[self._refreshed :]:
            host_maxima.refresh_maxima(self._values, maxima, self._layout.block, change.indices)
        self._refreshed = len(self._journal)
        return maxima

    def largest(self, num_selected: int, start: int = 0, stop: int | None = None) -> Indices:
        """Exactly the `num_selected` largest magnitudes in [start, stop); ties go to the lowest index."""
        return kernels.largest(self._values, self._exact_maxima(), self._layout, num_selected, start, stop)

    def kth_magnitude(self, k: int, start: int = 0, stop: int | None = None) -> float:
        """Exact k-th largest magnitude (k from 1) in [start, stop)."""
        return kernels.kth_magnitude(self._values, self._exact_maxima(), self._layout, k, start, stop)

    def at_least(self, threshold: float, start: int = 0, stop: int | None = None) -> Indices:
        """All positions in [start, stop) whose magnitude is >= threshold and not 0."""
        return kernels.at_least(self._values, self._bounds(), self._layout, threshold, start, stop)

    def take(self, indices: Indices) -> Values:
        """The values there, as a fresh array."""
        where = checked(indices, self.num_elements)
        out = np.empty(where.size, self.dtype)
        host_scatter.take_at(self._values, where, out)
        return out

    def clear(self, indices: Indices) -> None:
        """Sets the values there, and the companions', to 0."""
        where = checked(indices, self.num_elements)
        old = self._remember(where)
        for array in (self._values, *self._companions):
            host_scatter.clear_at(array, where)
        # all of them: 0 exactly, not the rounding of the fold's sum
        self._square_norm = 0.0 if where.size == self.num_elements else self._norm_without(old)

    def add(self, indices: Indices, values: Values) -> None:
        """Adds to the values there. Indices are unique."""
        where = checked(indices, self.num_elements)
        new = np.ascontiguousarray(values, self.dtype).reshape(-1)
        if new.size != where.size:
            raise ArgumentError("values", new.size, f"one for each of the {where.size} indices")
        old = self._remember(where)
        host_scatter.add_at(self._values, where, new)
        self._square_norm = self._norm_without(old) + _squares(self.take(where))
        if self._maxima is not None:
            host_maxima.raise_maxima(self._values, self._maxima, self._layout.block, where)

    def _norm_without(self, old: Values) -> float:
        return max(0.0, self._square_norm - _squares(old))

    def _remember(self, indices: Indices) -> Values:
        taken = []
        for array in (self._values, *self._companions):
            old = np.empty(indices.size, self.dtype)
            host_scatter.take_at(array, indices, old)
            taken.append(old)
        # A copy: the caller may reuse its array, and the journal must not change with it.
        self._journal.append(_Change(indices.copy(), taken[0], tuple(taken[1:])))
        return taken[0]

    def abandon(self) -> None:
        """Takes back every `clear` and `add` since the last fold, bit for bit."""
        for change in reversed(self._journal):
            host_scatter.put_at(self._values, change.indices, change.values)
            for array, old in zip(self._companions, change.companions, strict=True):
                host_scatter.put_at(array, change.indices, old)
        if self._maxima is not None:
            for change in self._journal:
                host_maxima.refresh_maxima(self._values, self._maxima, self._layout.block, change.indices)
        if self._journal:
            self._square_norm = self._report.square_norm
        self._journal.clear()
        self._refreshed = 0

    def values(self) -> Values:
        """All n values: a view, to be read only (use `assign` to change them)."""
        view = self._values.view()
        view.flags.writeable = False
        return view

    def assign(self, values: Values) -> None:
        """Replaces all n values (loading a checkpoint).

        Args:
            values: n elements of any float type, in any shape.

        Raises:
            ArgumentError: another number of elements.
        """
        new = np.asarray(values)
        if new.size != self.num_elements:
            raise ArgumentError("values", new.shape, f"an array of {self.num_elements} elements")
        self._values[...] = new.reshape(-1)
        self._square_norm = float(host_fold.squares_of(self._values, 0, self.num_elements))
        self._maxima = None
        self._journal.clear()
        self._refreshed = 0


def _squares(values: Values) -> float:
    wide = values.astype(np.float64)
    return float(np.dot(wide, wide))


def _accumulating(dtype: Any) -> type[np.floating[Any]]:
    """bfloat16 is no NumPy type: everything but float64 accumulates in float32."""
    name = str(getattr(dtype, "name", getattr(dtype, "__name__", dtype))).removeprefix("torch.")
    if name not in ("float16", "bfloat16", "uint16", "float32", "float64"):
        raise ArgumentError("dtype", dtype, "float32, float64, float16 or bfloat16")
    return np.float64 if name == "float64" else np.float32
