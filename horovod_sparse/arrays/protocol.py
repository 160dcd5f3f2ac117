"""The rule and the report of a fold, and the interface of the kernels that an accumulator calls."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.layout import Layout
from horovod_sparse.kernels.quantization import Quantization

Indices: TypeAlias = NDArray[np.int32]
Values: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class FoldReport:
    """A fold's result: NaN or Inf in gradients, squared norms of the residual before and accumulator after.

    Attributes:
        num_nonfinite: gradient elements that were NaN or Inf (or whose sum with the residual
            overflowed) and were taken as 0.
        first_nonfinite: position of the first of them in the bucket, -1 if there is none; n where the rank
            cancels the step for another reason (`Accumulator.mark_cancelled`).
        square_norm: sum of squares of the accumulator after the pass.
        carried_square_norm: sum of squares of the residual before it, decay included: what the last step
            left behind.
        step: synchronizations that the bucket has done before; see `Accumulator`.
        projection: the gradient's projection on a direction that ranks share; see `RankSimilarity`.
    """

    num_nonfinite: int = 0
    first_nonfinite: int = -1
    square_norm: float = 0.0
    carried_square_norm: float = 0.0
    step: int = 0
    projection: float = 0.0


@dataclass(frozen=True)
class FoldRule:
    """Says how a fold adds a gradient to an accumulator: ``values = decay * values + gradient``.

    With a moment the gradient is normalized first: ``v = moment v + (1 - moment) gradient^2``, v being the
    first companion, and ``rate gradient / (sqrt(v / (1 - moment^count) + floor) + eps)`` is added. A gradient
    whose square is no finite number counts as not finite, and leaves v as it is.

    Args:
        decay: factor of the old values; 0 forgets them (no error feedback).
        momentum: if given, in [0, 1]: the first companion becomes momentum * companion + gradient, and
            that is added instead of the gradient.
        nesterov: with momentum, add gradient + momentum * companion.
        masking: whether `Accumulator.clear` clears the companions too, until the next fold.
        clip_norm: if given, above 0: a gradient whose finite elements have a larger L2 norm is scaled
            down to it.
        moment: if given, in (0, 1), and instead of momentum: how much of the second moment lasts.
        rate: factor of the normalized gradient, or of what momentum adds.
        eps: added to the root of the moment; it or `floor` is above 0.
        floor: added to the moment, within the root.
        count: number of gradients in the moment, this one included; inf for no bias correction.

    Raises:
        ArgumentError: something is outside what is allowed.

    Example:
        >>> FoldRule(momentum=0.5, nesterov=True).factors(np.dtype(np.float64)).tolist()
        [1.0, 0.5, 1.0, 0.5]
        >>> FoldRule(moment=0.75, rate=4.0, eps=1.0).factors(np.dtype(np.float64)).tolist()
        [1.0, 0.75, 0.25, 2.0, 0.5, 0.0]
    """

    decay: float = 1.0
    momentum: float | None = None
    nesterov: bool = False
    masking: bool = True
    clip_norm: float | None = None
    moment: float | None = None
    rate: float = 1.0
    eps: float = 1e-8
    floor: float = 0.0
    count: float = 1

    def __post_init__(self) -> None:
        if self.momentum is not None and not 0.0 <= self.momentum <= 1.0:
            raise ArgumentError("momentum", self.momentum, "a number in [0, 1]")
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise ArgumentError("clip_norm", self.clip_norm, "a norm above 0")
        if self.moment is not None and not (0.0 < self.moment < 1.0 and self.momentum is None):
            raise ArgumentError("moment", self.moment, "a second moment's decay in (0, 1), no momentum")

    @functools.cached_property
    def num_companions(self) -> int:
        """The number of arrays (velocity or moment) that the fold changes beside the values."""
        return int(self.momentum is not None or self.moment is not None)

    @functools.lru_cache(maxsize=32)  # noqa: B019 -- rules are small values, the same in most folds
    def factors(self, dtype: np.dtype[Any]) -> Values:
        """Returns (a, b, c, d) of the fold ``u = b u + gradient; values = a values + c gradient + d u``.

        With a moment a to f of ``v = b v + c gradient^2`` and ``values = a values + d gradient / (sqrt(v + f)
        + e)``; its bias correction is in d, e and f.

        Raises:
            ArgumentError: a factor is no number that the accumulator's dtype can hold.
        """
        if self.moment is None:
            momentum = self.momentum or 0.0
            added = (1.0, momentum) if self.nesterov else (0.0, 1.0)
            numbers = [self.decay, momentum, *(self.rate * factor for factor in added)]
        else:
            held = 1.0 - self.moment**self.count
            of_root = [factor * math.sqrt(held) for factor in (self.rate, self.eps)]
            numbers = [self.decay, self.moment, 1.0 - self.moment, *of_root, self.floor * held]
        with np.errstate(over="ignore", under="ignore"):
            factors = np.array(numbers, dtype)
        if not np.isfinite(factors[0]):
            raise ArgumentError("decay", self.decay, f"a number that {dtype.name} can hold")
        if self.moment is not None and not (np.isfinite(factors).all() and factors[4:].any()):
            allowed = f"a finite rate, and an eps or a floor above 0, also in {dtype.name}"
            raise ArgumentError("rate, eps", (self.rate, self.eps), allowed)
        return factors


#: an array of n or k elements, or a sum of squares, where the kernels keep it: host or device
Memory: TypeAlias = Any
Number: TypeAlias = Any


class Kernels(Protocol):
    """The array operations that an accumulator calls; each accumulator has an object of its own.

    `where` are indices that `checked_indices` returned. Block maxima hold magnitude bits: bits without the
    sign, which order like the magnitudes. Callers have checked windows [start, stop), and k within them.
    """

    #: n elements, and the blocks whose maxima are kept
    layout: Layout
    #: dtype of the values: float32 or float64
    dtype: np.dtype[Any]

    def zeros(self) -> Memory:
        """Returns n zeros."""

    def fold(
        self,
        values: Memory,
        companion: Memory | None,
        gradient: Any,
        maxima: Memory,
        rule: FoldRule,
        norm: Number,
        step: int,
    ) -> tuple[FoldReport, Number]:
        """Makes the one pass over n elements: updates values, companion and maxima; returns report and norm.

        `norm` is the sum of squares of the values before the fold; the result has the one after it. Raises an
        `ArgumentError` for a gradient or rule that does not fit, and changes nothing then.
        """

    def with_projection(self, report: FoldReport, samples: Any, signs: Values, rule: FoldRule) -> FoldReport:
        """Returns a fold's report with `projection` set: the sum of signs times gradient at the samples."""

    def undo_fold(self, values: Memory, companion: Memory | None, gradient: Any, rule: FoldRule) -> None:
        """Subtracts a folded gradient from values and companion again, up to rounding."""

    def assign(self, values: Memory, new: Any) -> None:
        """Replaces all n values; raises an `ArgumentError` if the new ones do not fit."""

    def empty_maxima(self) -> Memory:
        """Returns uninitialized memory for the maxima of all blocks."""

    def scan_maxima(self, values: Memory, maxima: Memory) -> None:
        """Computes the maxima of all blocks."""

    def refresh_maxima(self, values: Memory, maxima: Memory, where: Memory) -> None:
        """Recomputes the maxima of the blocks that contain these indices."""

    def largest(
        self, values: Memory, maxima: Memory, k: int, start: int, stop: int
    ) -> tuple[Indices, Memory | None]:
        """Returns the indices of the k largest, 0 < k < stop - start; of equal ones the lowest.

        The second result is their values, or None if the kernel has not read them anyway.
        """

    def largest_of_each(
        self, values: Memory, chunk: int, quotas: NDArray[np.int64]
    ) -> tuple[Indices, Memory | None]:
        """Returns indices (and values) of each chunk's largest magnitudes, as many as its quota says."""

    def kth(self, values: Memory, maxima: Memory, k: int, start: int, stop: int) -> Any:
        """Returns the magnitude bits of the k-th largest, 1 <= k <= stop - start; `maxima` are exact."""

    def at_least(self, values: Memory, maxima: Memory, bits: Any, start: int, stop: int) -> Indices:
        """Returns the indices with magnitude bits >= `bits`, ascending; `maxima` are upper bounds."""

    def sample(self, values: Memory, stride: int, offset: int) -> Values:
        """Returns every stride-th magnitude, from element `offset` on."""

    def checked_indices(self, indices: Any, *, keep: bool = False) -> Memory:
        """Checks indices, and moves them to the values' device; with `keep` as a copy of the caller's."""

    def from_host(self, values: Any) -> Memory:
        """Copies k values from the host to where the accumulator's are, in its dtype."""

    def to_host(self, memory: Memory) -> Values:
        """Returns k values as a host array that the caller may change."""

    def view(self, values: Memory) -> Values:
        """Returns n values as a host array, without a copy where that is possible."""

    def take(self, values: Memory, where: Memory) -> Memory:
        """Returns a copy of the values at these indices."""

    def zero(self, values: Memory, where: Memory) -> None:
        """Writes 0 at these indices."""

    def put(self, values: Memory, where: Memory, new: Memory) -> None:
        """Writes values at unique indices."""

    def add(self, values: Memory, where: Memory, olds: Memory, new: Memory) -> None:
        """Writes ``olds + new`` to the values at unique indices, but not where that is not finite."""

    def sum_of_squares(self, values: Memory) -> Number:
        """Returns the sum of squares of n values."""

    def number(self, value: float) -> Number:
        """Returns a float as a `Number`: a sum of squares as the kernels keep it, on host or device."""

    def float_of(self, number: Number) -> float:
        """Returns a `Number` as a float; may wait for a device."""

    def updated_norm(self, norm: Number, old: Memory, new: Memory | None = None) -> Number:
        """Returns a sum of squares after k values have changed from `old` to `new`, or to 0."""

    def quantize(self, values: Memory, code: Quantization, key: int, words: NDArray[np.int32]) -> Memory:
        """Writes all values' codes to `words` on the host; returns the rounding errors."""
