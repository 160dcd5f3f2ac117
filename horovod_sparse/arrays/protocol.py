"""What a sparsifier may ask of the memory it works on.

What has n elements stays where it is (host or accelerator); what has k elements (indices, values)
is a NumPy array on the host, where Horovod's Ethernet transport needs it anyway. So one protocol is
enough, and a sparsifier never learns which framework holds the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels.quantization import Quantization


@dataclass(frozen=True)
class Moments:
    """Sums over the magnitudes that are >= a threshold and not 0.

    Attributes:
        count: how many there are.
        total: sum of |x|.
        total_squares: sum of x**2.
        total_logarithms: sum of ln |x|.

    Example:
        >>> Moments(2, 4.0, 10.0, 1.0986).mean
        2.0
    """

    count: int
    total: float
    total_squares: float
    total_logarithms: float

    @property
    def mean(self) -> float:
        """Mean |x|; 0 if there is none."""
        return self.total / self.count if self.count else 0.0

    @property
    def mean_square(self) -> float:
        """Mean x**2; 0 if there is none."""
        return self.total_squares / self.count if self.count else 0.0

    @property
    def mean_logarithm(self) -> float:
        """Mean ln |x|; 0 if there is none."""
        return self.total_logarithms / self.count if self.count else 0.0


Indices = NDArray[np.int32]
Values = NDArray[Any]


@dataclass(frozen=True)
class FoldReport:
    """What one fused pass learned about the gradient and the accumulator.

    Attributes:
        num_nonfinite: gradient elements that were NaN or Inf (or whose sum with the residual
            overflowed) and were taken as 0.
        first_nonfinite: position of the first of them in the bucket, -1 if there is none; n where the rank
            refuses the step for another reason (`Accumulator.refuse`).
        square_norm: sum of squares of the accumulator after the pass.
        carried_square_norm: sum of squares of the residual before it, decay included: what the last step
            left behind.
        step: synchronizations that the bucket has done before; see `Accumulator`.
    """

    num_nonfinite: int = 0
    first_nonfinite: int = -1
    square_norm: float = 0.0
    carried_square_norm: float = 0.0
    step: int = 0


class Accumulator(Protocol):
    """Residual plus gradient of one bucket, in the residual's memory.

    All indices are int32 positions within the bucket, ascending and unique where a method returns
    them. Changes to the values after `fold` are journaled, so that `abandon` can take them back.

    Attributes:
        step: synchronizations that there have been, which the report of the next fold says.
    """

    step: int

    @property
    def num_elements(self) -> int:
        """n, the number of elements."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """float64 for float64 gradients, float32 for all others (half types accumulate in float32)."""

    @property
    def report(self) -> FoldReport:
        """Of the last fold."""

    @property
    def square_norm(self) -> float:
        """Sum of squares of what is held back now (`residual`), in O(1).

        That of the last fold, less what was cleared since: it keeps the rounding of the fold's sum,
        about 1e-6 of that.
        """

    @property
    def companions(self) -> tuple[Any, ...]:
        """Arrays of n elements, kept beside the values and restored with them: a velocity, for example."""

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
        """Values = decay * values + gradient; gradient = 0; block maxima. The one pass over n elements.

        Args:
            gradient: n elements in any shape and strides, where the memory is, of a type that accumulates in
                its own. Set to 0. Or of a kind that is kept: `GradientParts`, `KeptTensor`.
            decay: factor of the old values.
            momentum: if given, the first companion becomes momentum * companion + gradient, and that is
                added instead of the gradient.
            nesterov: with momentum, add gradient + momentum * companion.
            masking: whether `clear` clears the companions too, until the next fold.
            keep_residual: False forgets the old values (no error feedback).
            clip_norm: if given, a gradient whose finite elements have a larger L2 norm is scaled down to it.
            low_pass: if given, beta: the first companion becomes decay * companion + gradient, and values
                (1 - beta) * gradient + beta * companion; until the next fold it follows their changes.

        Returns:
            What the pass learned; reading its numbers may wait for a device.

        Raises:
            ArgumentError: shape, type or device do not fit, or momentum or a filter without a companion.
        """

    def refuse(self) -> None:
        """Lets the report of the last fold say that this rank refuses the step."""

    def heal(self) -> None:
        """Lets the report of the last fold say that this rank is well, after `abandon` and `drop`."""

    def largest(self, num_selected: int, start: int = 0, stop: int | None = None) -> Indices:
        """Exactly the `num_selected` largest magnitudes in [start, stop); ties go to the lowest index."""

    def kth_magnitude(self, k: int, start: int = 0, stop: int | None = None) -> float:
        """Exact k-th largest magnitude (k from 1) in [start, stop)."""

    def at_least(self, threshold: float, start: int = 0, stop: int | None = None) -> Indices:
        """All positions in [start, stop) whose magnitude is >= threshold and not 0."""

    def count_at_least(self, thresholds: Any) -> NDArray[np.int64]:
        """How many magnitudes are >= each threshold and not 0, for several thresholds in one read."""

    def moments(self, threshold: float = 0.0) -> Moments:
        """Moments of the magnitudes that are >= threshold and not 0, in one read."""

    def sample_magnitudes(self, stride: int, offset: int = 0) -> Values:
        """Every stride-th magnitude from offset on."""

    def take(self, indices: Indices) -> Values:
        """The values there, as a fresh array."""

    def clear(self, indices: Indices) -> None:
        """Sets the values there to 0.

        What a feedback keeps beside them is set to 0, too, or stays, or follows: then what stood there is
        subtracted from it. The last fold has said which.
        """

    def add(self, indices: Indices, values: Values) -> None:
        """Adds to the values there, and to what follows them (what a rank gives back to its residual).

        Indices are unique.
        """

    def put(self, indices: Indices, values: Values) -> None:
        """Exactly these finite values there; what a feedback keeps beside them stays, or follows.

        Indices are unique.
        """

    def quantize(self, code: Quantization, key: int, words: NDArray[np.int32]) -> float:
        """Writes all values as codes of few bits, and leaves them as they are.

        Args:
            code: how.
            key: 64 bits, of the random numbers by which values are rounded.
            words: int32, `code.num_words` of them; overwritten.

        Returns:
            Sum of squares of what the words lose.
        """

    def subtract(self, code: Quantization, words: NDArray[np.int32], left: float | None = None) -> None:
        """What these words stand for leaves all values, and what follows them; a velocity stays.

        Once a step, and the last change in it. It is carried out when the values are needed, so `abandon`
        takes no copy of them.

        Args:
            code: how they were written.
            words: as `quantize` wrote them; not to be changed until the next fold.
            left: sum of squares of the values then, where it is known.
        """

    def mask(self, indices: Indices) -> None:
        """Clears what a feedback clears with the values there, as `clear` does; the values stay."""

    def abandon(self) -> None:
        """Takes back every `clear`, `add`, `put` and `mask` since the last fold, bit for bit."""

    def drop(self, gradient: Any) -> None:
        """Takes the last fold's gradient out of the values (and their companion) again, after `abandon`.

        What was there before, decay included, comes back to the rounding of the sum: where the gradient
        was more than 2**24 times larger nothing is left of it, and the value is 0.

        Args:
            gradient: as it was folded; it must have been kept.
        """

    def values(self) -> Values:
        """All n values as a host array, a view where that is possible (checkpoints, tests)."""

    def residual(self) -> Values:
        """What is held back, as a host array: gradients that were folded and not sent.

        The values, unless the last fold has filtered them: then the companion that follows them.
        """

    def assign(self, values: Values) -> None:
        """Replaces all n values (loading a checkpoint)."""
