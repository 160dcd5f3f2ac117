"""The accumulator (residual plus gradient) of a bucket, and a journal that undoes a step's changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays.protocol import FoldReport, FoldRule, Indices, Kernels, Memory, Values
from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.layout import bits_of, float_of
from horovod_sparse.kernels.quantization import Quantization

_PLAIN = FoldRule()


class Journal:
    """Records elements before they change, so that all changes since the last fold can be undone."""

    def __init__(self, kernels: Kernels, arrays: tuple[Memory, ...]) -> None:
        self._kernels, self.arrays = kernels, arrays
        #: indices, and the values there in every array before they changed
        self._changes: list[tuple[Memory, tuple[Memory, ...]]] = []
        self._num_read = 0
        #: indices that a selection has read, and the values of the first array there
        self.found: tuple[Memory, Memory] | None = None

    def remember(self, where: Memory) -> tuple[Memory, ...]:
        """Records the elements at these indices in every array, before they change; returns their values."""
        known, self.found = self.found, None
        read = () if known is None or known[0] is not where else known[1:]
        olds = read + tuple(self._kernels.take(array, where) for array in self.arrays[len(read) :])
        self._changes.append((where, olds))
        return olds

    def unread_changes(self) -> Iterator[Memory]:
        """Yields the indices changed since the last call."""
        first, self._num_read = self._num_read, len(self._changes)
        yield from (where for where, _ in self._changes[first:])

    def undo(self) -> list[Memory]:
        """Restores all recorded elements, the last change first; returns the changed indices."""
        for where, olds in reversed(self._changes):
            for array, old in zip(self.arrays, olds, strict=True):
                self._kernels.put(array, where, old)
        changed = [where for where, _ in self._changes]
        self.forget()
        return changed

    def forget(self) -> None:
        """Empties the record, so that the changes can no longer be undone."""
        self._changes.clear()
        self._num_read, self.found = 0, None


class Accumulator:
    """The residual of one bucket: a step adds the gradient, and the sparsifier removes what it sends.

    What has n elements stays where it is, on the host or a device; what has k elements (indices, values) is
    a NumPy array on the host, whose network sends it. So a sparsifier never learns which framework holds
    the gradient, and selections and sums have the same bits in every memory.

    All indices are int32 positions within the bucket, ascending and unique where a method returns
    them. Changes to the values after `fold` are journaled, so that `abandon` can take them back.

    Made as `HostAccumulator`, or by a front end in its own memory.

    Args:
        kernels: the operations on arrays in this memory.
        num_companions: number of arrays like the values that a feedback also keeps, such as a velocity.

    Attributes:
        dtype: float64 for float64 gradients, float32 for all others (half types accumulate in float32).
        companions: arrays of n elements beside the values, and restored with them: a velocity, for example.
        step: number of synchronizations so far, which the next fold's report contains.
        report: the last fold's report; reading its numbers may wait for a device.
    """

    def __init__(self, kernels: Kernels, num_companions: int) -> None:
        self.num_elements, self.dtype = kernels.layout.num_elements, kernels.dtype
        self._kernels, self._values = kernels, kernels.zeros()
        self.companions = tuple(kernels.zeros() for _ in range(num_companions))
        self.step = 0
        self.report = FoldReport()
        self._journal = Journal(kernels, (self._values, *self.companions))
        #: sums of squares, now and after the last fold
        self._norm = self._norm_at_fold = kernels.number(0.0)
        #: rule of the last fold, and the companion that it changed
        self._folded: tuple[FoldRule, Memory | None] = _PLAIN, None
        #: rounding errors from `quantize`: the values from the next use on
        self._rest: Memory | None = None
        self._maxima = kernels.empty_maxima()
        self._maxima_known = False
        #: True if a value may exceed its block's maximum, which the next selection then recomputes
        self._has_grown = False

    @property
    def square_norm(self) -> float:
        """The sum of squares of all values now, in O(1).

        That of the last fold, less what was cleared since: it keeps the rounding of the fold's sum,
        about 1e-6 of that.
        """
        return self._kernels.float_of(self._norm)

    def fold(self, gradient: Any, rule: FoldRule = _PLAIN) -> FoldReport:
        """Called once a step: computes values = decay * values + gradient, and the blocks' maxima.

        Args:
            gradient: n elements in any shape, where the memory is, of a type that accumulates in its own;
                bfloat16 may come as its bits, in uint16. On the host also `GradientParts`. It is read only.
            rule: decay, momentum, clipping.

        Returns:
            The fold's report; reading its numbers may wait for a device.

        Raises:
            ArgumentError: shape, type or device do not fit, or there is no companion for momentum or moment.
        """
        companion = None
        if rule.num_companions:
            if not self.companions:
                allowed = "one without momentum or moment, or make the accumulator with companions=1"
                raise ArgumentError("rule", rule, allowed)
            companion = self.companions[0]
        if rule.decay:
            self._adopt_rounding_errors()
        self.report, self._norm = self._kernels.fold(
            self._values, companion, gradient, self._maxima, rule, self._norm, self.step
        )
        self._rest = None
        self._folded = rule, companion
        cleared = self.companions if rule.masking else ()
        self._journal = Journal(self._kernels, (self._values, *cleared))
        self._maxima_known = True
        self._norm_at_fold = self._norm
        return self.report

    def fold_with_projection(self, gradient: Any, rule: FoldRule, indices: Indices, signs: Values) -> None:
        """Folds, and reports the gradient's dot product with `signs` at `indices`, for `RankSimilarity`."""
        self._adopt_rounding_errors()
        where = self._kernels.checked_indices(indices)
        before = self._kernels.take(self._values, where)
        self.fold(gradient, rule)
        samples = before, *(self._kernels.take(array, where) for array in self.memory())
        self.report = self._kernels.with_projection(self.report, samples, signs, rule)

    def zero_spans(self, spans: Sequence[tuple[int, int]]) -> list[tuple[slice, list[Memory]]]:
        """Sets the spans of parameters without a gradient to 0 before a fold; returns their old contents."""
        arrays = self.memory()
        hidden = [(slice(*span), [array[slice(*span)] * 1.0 for array in arrays]) for span in spans]
        for where, _ in hidden:
            for array in arrays:
                array[where] = 0
        return hidden

    def restore_spans(self, hidden: Sequence[tuple[slice, Sequence[Memory]]], factor: float) -> None:
        """Adds what `zero_spans` returned, after the step; multiplies companions there by `factor`."""
        self._adopt_rounding_errors()
        for where, (values, *companions) in hidden:
            values += self._values[where]  # rounding errors, or what others did not send on
            self._norm = self._kernels.updated_norm(self._norm, self._values[where], values)
            self._values[where] = values
            for companion, before in zip(self.companions, companions, strict=True):
                companion[where] = before * factor
        self._maxima_known = False

    def mark_cancelled(self) -> None:
        """Marks the last fold's report, so that all ranks learn that this rank cancels the step."""
        # a `PendingReport` is no dataclass FoldReport
        fields = {field.name: getattr(self.report, field.name) for field in dataclasses.fields(FoldReport)}
        self.report = FoldReport(**fields | {"first_nonfinite": self.num_elements})

    def _block_maxima(self, *, exact: bool = False) -> Memory:
        """Returns the blocks' maxima: exact right after a fold or with `exact`, else upper bounds of them."""
        if not self._maxima_known:
            self._kernels.scan_maxima(self._values, self._maxima)
            self._maxima_known = True
        if exact or self._has_grown:
            for where in self._journal.unread_changes():
                self._kernels.refresh_maxima(self._values, self._maxima, where)
            self._has_grown = False
        return self._maxima

    def _adopt_rounding_errors(self) -> None:
        """Makes the rounding errors of `quantize` the values, at their next use; `abandon` cannot undo it."""
        if self._rest is not None:
            self._values[...] = self._rest
            self._rest = None
            self._maxima_known = False
            self._journal.forget()

    def _checked_window(self, start: int, stop: int | None) -> tuple[int, int]:
        self._adopt_rounding_errors()
        first, last = int(start), self.num_elements if stop is None else int(stop)
        if not 0 <= first <= last <= self.num_elements:
            allowed = f"a window within [0, {self.num_elements}]"
            raise ArgumentError("start, stop", (start, stop), allowed)
        return first, last

    def largest(self, num_selected: int, start: int = 0, stop: int | None = None) -> Indices:
        """Returns the indices of the largest magnitudes in [start, stop); of equal ones the lowest.

        A number above the window's length selects the whole window.
        """
        start, stop = self._checked_window(start, stop)
        if num_selected < 0:
            raise ArgumentError("num_selected", num_selected, "0 or more")
        if num_selected >= stop - start:
            return np.arange(start, stop, dtype=np.int32)
        if num_selected == 0:
            return np.empty(0, np.int32)
        maxima = self._block_maxima(exact=True)
        return self._keep_selection(*self._kernels.largest(self._values, maxima, num_selected, start, stop))

    def largest_of_each(self, chunk: int, quotas: NDArray[np.int64]) -> Indices:
        """Returns the indices of each chunk's largest magnitudes, as many as the chunk's quota."""
        self._adopt_rounding_errors()
        return self._keep_selection(*self._kernels.largest_of_each(self._values, chunk, quotas))

    def _keep_selection(self, indices: Indices, values: Memory | None) -> Indices:
        self._journal.found = None if values is None else (indices.copy(), values)
        return indices

    def kth_magnitude(self, k: int, start: int = 0, stop: int | None = None) -> float:
        """Returns the k-th largest magnitude (k from 1) in [start, stop)."""
        start, stop = self._checked_window(start, stop)
        if not 1 <= k <= stop - start:
            raise ArgumentError("k", k, f"a rank from 1 to {stop - start}, the elements of the window")
        maxima = self._block_maxima(exact=True)
        return float_of(self._kernels.kth(self._values, maxima, k, start, stop), self.dtype)

    def at_least(self, threshold: float, start: int = 0, stop: int | None = None) -> Indices:
        """Returns the indices in [start, stop) with magnitude >= threshold, but not those of zeros."""
        start, stop = self._checked_window(start, stop)
        bits = bits_of(threshold, self.dtype)
        if start == stop:
            return np.empty(0, np.int32)
        return self._kernels.at_least(self._values, self._block_maxima(), bits, start, stop)

    def sample_magnitudes(self, stride: int, offset: int = 0) -> Values:
        """Returns every stride-th magnitude, from element `offset` on."""
        self._adopt_rounding_errors()
        if stride < 1 or offset < 0:
            raise ArgumentError("stride, offset", (stride, offset), "a stride from 1, an offset from 0")
        return self._kernels.sample(self._values, stride, offset)

    def take(self, indices: Indices) -> Values:
        """Returns a copy of the values at these indices."""
        self._adopt_rounding_errors()
        return self._kernels.to_host(self._kernels.take(self._values, self._kernels.checked_indices(indices)))

    def remove(self, indices: Indices, sent: Callable[[Values], Values] | None = None) -> Values:
        """Returns the values at these indices as a new array, and sets them to 0.

        With `sent`, a rounding, the rounded values are returned, and the difference stays.
        """
        where, olds = self._remember_values(indices)
        values = np.array(self._kernels.to_host(olds[0]))
        rounded = values if sent is None else sent(values)
        if rounded is values:
            self._clear(where, olds[0])
        else:
            left = self._kernels.from_host(values - rounded)
            self._kernels.put(self._values, where, left)
            for companion in self._journal.arrays[1:]:
                self._kernels.zero(companion, where)
            self._update_norm(olds[0], left)
        return rounded

    def clear(self, indices: Indices) -> None:
        """Sets the values at sent indices to 0, and the companions there if the fold's rule has `masking`."""
        where, olds = self._remember_values(indices)
        self._clear(where, olds[0])

    def _remember_values(self, indices: Indices) -> tuple[Memory, tuple[Memory, ...]]:
        """Checks the indices, records the values there in the journal, and returns both."""
        self._adopt_rounding_errors()
        found = self._journal.found
        if found is not None and np.array_equal(found[0], indices):
            where = found[0]  # checked by the selection
        else:
            where = self._kernels.checked_indices(indices, keep=True)
        return where, self._journal.remember(where)

    def _clear(self, where: Memory, old: Memory) -> None:
        for array in self._journal.arrays:
            self._kernels.zero(array, where)
        if len(where) < self.num_elements:
            self._norm = self._kernels.updated_norm(self._norm, old)
        else:  # all of them: 0 exactly, not the rounding of the fold's sum
            self._norm = self._kernels.number(0.0)

    def add(self, indices: Indices, values: Values) -> None:
        """Adds to the values at these unique indices; skips an element whose sum would not be finite."""
        where, new = self._checked_values(indices, values)
        olds = self._journal.remember(where)
        self._kernels.add(self._values, where, olds[0], new)
        self._update_norm(olds[0], self._kernels.take(self._values, where))

    def put(self, indices: Indices, values: Values) -> None:
        """Writes finite values at these unique indices; companions do not change."""
        where, new = self._checked_values(indices, values)
        olds = self._journal.remember(where)
        self._kernels.put(self._values, where, new)
        self._update_norm(olds[0], new)

    def _checked_values(self, indices: Indices, values: Values) -> tuple[Memory, Memory]:
        self._adopt_rounding_errors()
        where = self._kernels.checked_indices(indices, keep=True)
        if np.size(values) != len(where):
            raise ArgumentError("values", np.size(values), f"one for each of the {len(where)} indices")
        return where, self._kernels.from_host(values)

    def _update_norm(self, old: Memory, new: Memory) -> None:
        self._norm = self._kernels.updated_norm(self._norm, old, new)
        self._has_grown = True

    def mask(self, indices: Indices) -> None:
        """Sets the companions at sent indices to 0 if the fold's rule has `masking`; values stay."""
        _, *companions = self._journal.arrays
        if companions:
            where = self._kernels.checked_indices(indices, keep=True)
            self._journal.remember(where)
            for companion in companions:
                self._kernels.zero(companion, where)

    def quantize(self, code: Quantization, key: int, words: NDArray[np.int32]) -> None:
        """Writes all values to `words` in a few bits each; the rounding errors become the values.

        Has to be the last change of a step: the values stay until their next use, so `abandon` needs no copy.
        `key` is a seed of 64 bits for random rounding; `words` are overwritten.
        """
        self._adopt_rounding_errors()
        self._rest = self._kernels.quantize(self._values, code, key, words)
        self._norm = self._kernels.sum_of_squares(self._rest)

    def abandon(self) -> None:
        """Undoes removals and other changes since the last fold, bit for bit; the fold itself stays."""
        changed = self._rest is not None
        self._rest = None
        for where in (restored := self._journal.undo()):
            if self._maxima_known:
                self._kernels.refresh_maxima(self._values, self._maxima, where)
        if changed or restored:
            self._norm = self._norm_at_fold

    def accept(self) -> None:
        """Frees memory that only this step needs; called once all ranks have applied the step."""

    def drop(self, gradient: Any) -> None:
        """Removes the last fold's gradient from values and companions; call `abandon` before.

        Restores the values before the fold, decay included, up to the rounding of the sum: where the gradient
        was more than 2**24 times larger, the value becomes 0.
        """
        rule, companion = self._folded
        self._kernels.undo_fold(self._values, companion, gradient, rule)
        self._recompute_norm()

    def values(self) -> Values:
        """Returns all n values as a read-only host array: a view where that is possible."""
        view = self._kernels.view(self._values if self._rest is None else self._rest)
        view.flags.writeable = False
        return view

    def host_arrays(self) -> tuple[Values, ...]:
        """Returns the values and the companions, each as a host array, like `values`."""
        return (self.values(), *(self._kernels.view(companion) for companion in self.companions))

    def assign_arrays(self, arrays: Sequence[Any]) -> None:
        self.assign(arrays[0])
        for companion, values in zip(self.companions, arrays[1:], strict=True):
            self._kernels.assign(companion, values)

    def memory(self) -> tuple[Memory, ...]:
        """Returns values and companions themselves; a caller that changes them calls `assign` afterwards."""
        self._adopt_rounding_errors()
        return (self._values, *self.companions)

    def assign(self, values: Any) -> None:
        """Replaces all n values by finite ones, of any float type and shape."""
        self._kernels.assign(self._values, values)
        self._rest = None
        self._recompute_norm()

    def _recompute_norm(self) -> None:
        """Recomputes the norm and empties the journal; called after all values were replaced."""
        self._norm = self._norm_at_fold = self._kernels.sum_of_squares(self._values)
        self._maxima_known = False
        self._journal.forget()
