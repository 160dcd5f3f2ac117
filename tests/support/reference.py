"""A plain, slow `Accumulator` and the primitives below it: what the fast ones are compared with, bit for bit.

Everything here may be slow and may copy; nothing may be clever.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.arrays import FoldReport, FoldRule, Indices, Moments, Values
from horovod_sparse.kernels.quantization import Quantization
from support.quantizers_reference import decoded, packed, quantized

Array = np.ndarray


def widen(gradient: Array, kind: Any) -> Array:
    """A gradient in the accumulator's type; uint16 holds the bits of bfloat16, int16 those of float16."""
    if gradient.dtype == np.uint16:
        return (gradient.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(kind)
    if gradient.dtype == np.int16:
        return gradient.view(np.float16).astype(kind)
    return gradient.astype(kind)


@dataclass(frozen=True)
class Folded:
    """What a fold makes of its inputs; `nonfinite` are the positions taken as 0, ascending."""

    values: Array
    companion: Array | None
    nonfinite: Array
    square_norm: float


def fold(
    values: Array,
    gradient: Array,
    *,
    decay: float = 1.0,
    velocity: Array | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    moment: tuple[Array, Any] | None = None,
) -> Folded:
    """values = decay * values + gradient, or with momentum correction, or normalized by a second moment.

    With `moment` come four numbers: its factor, that of a square, the rate, eps.
    """
    kind = values.dtype.type
    with np.errstate(all="ignore"):
        step = widen(gradient, kind)
        wrong = ~np.isfinite(step)
        step[wrong] = 0
        speed = None
        if moment is not None:
            before, (lasting, fresh, rate, eps) = moment
            speed = lasting * before + fresh * (step * step)
            wrong |= ~np.isfinite(speed)
            speed[wrong] = before[wrong]
            step = np.where(wrong, kind(0), rate * step / (np.sqrt(speed) + eps))
        if velocity is not None:
            kept_speed = kind(momentum) * velocity
            speed = kept_speed + step
            overflow = ~np.isfinite(speed)
            speed[overflow] = kept_speed[overflow]
            wrong |= overflow
            step = step + kind(momentum) * speed if nesterov else speed
        kept = kind(decay) * values
        new = kept + step
        overflow = ~np.isfinite(new)
        new[overflow] = np.where(np.isfinite(kept), kept, values)[overflow]
        wrong |= overflow
    wide = new.astype(np.float64)
    return Folded(new, speed, np.flatnonzero(wrong), float((wide * wide).sum()))


def block_maxima(values: Array, block: int) -> Array:
    return np.array([np.abs(values[i : i + block]).max() for i in range(0, values.size, block)], values.dtype)


def largest(values: Array, k: int, start: int, stop: int | None) -> Array:
    """Positions of the k largest magnitudes of a window, ascending; ties go to the lowest."""
    order = np.argsort(-np.abs(values[start:stop]), kind="stable")
    return np.sort(order[:k] + start).astype(np.int32)


def at_least(values: Array, threshold: float, start: int, stop: int | None) -> Array:
    """Positions of a window whose magnitude is >= threshold and not 0; no threshold is rounded to float32."""
    sizes = np.abs(values[start:stop].astype(np.float64))
    return (np.flatnonzero((sizes >= threshold) & (sizes > 0)) + start).astype(np.int32)


def check_moments(found: Moments, values: Array, threshold: float) -> None:
    """Of the magnitudes >= threshold and not 0, to the precision of float32 numbers."""
    sizes = np.abs(values[at_least(values, threshold, 0, values.size)].astype(np.float64))
    assert found.count == sizes.size
    np.testing.assert_allclose(found.total, sizes.sum(), rtol=1e-5)
    np.testing.assert_allclose(found.total_squares, (sizes * sizes).sum(), rtol=1e-5)
    # logarithms cancel: to the precision of one of them, each
    np.testing.assert_allclose(found.total_logarithms, np.log(sizes).sum(), 1e-5, 1e-5 * (1 + sizes.size))


def add_into(dense: Array, indices: Array, values: Array) -> tuple[Array, int]:
    """dense with values added at indices, one after the other; how many elements held +0.0 before."""
    out = dense.copy()
    for index, value in zip(indices, values, strict=True):
        out[index] = out[index] + value
    touched = np.unique(indices)
    return out, int(((dense[touched] == 0) & ~np.signbit(dense[touched])).sum())


def clipped(gradient: Values, clip_norm: float) -> Values:
    """A gradient of float32 or float64 scaled down to a norm of its finite elements."""
    finite = np.where(np.isfinite(gradient), gradient, 0).astype(np.float64)
    norm = float(np.linalg.norm(finite))
    return gradient if norm <= clip_norm else gradient * gradient.dtype.type(clip_norm / norm)


class ReferenceAccumulator:
    """Residual plus gradient of a bucket, each method in the most obvious way.

    Takes the same arguments as `HostAccumulator`; those that only concern speed are ignored.
    """

    def __init__(
        self, num_elements: int, dtype: np.dtype[Any], *, density: float = 0.001, companions: int = 0
    ) -> None:
        self._values = np.zeros(num_elements, dtype)
        self.companions = tuple(np.zeros(num_elements, dtype) for _ in range(companions))
        self._masked = self.companions
        self._folded = self._values.copy(), [companion.copy() for companion in self.companions]
        self._report = FoldReport()
        self.step = 0

    @property
    def num_elements(self) -> int:
        return self._values.size

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._values.dtype

    @property
    def report(self) -> FoldReport:
        return self._report

    @property
    def square_norm(self) -> float:
        return float(np.sum(np.square(self._values, dtype=np.float64)))

    def fold(self, gradient: np.ndarray, rule: FoldRule = FoldRule()) -> FoldReport:  # noqa: B008
        decay, companion = rule.decay * rule.keep_residual, (*self.companions, None)[0]
        self._masked = self.companions if rule.masking else ()
        carried = decay**2 * self.square_norm
        step = widen(gradient, self.dtype)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if rule.clip_norm is not None:
                step = clipped(step, rule.clip_norm)
        like: dict[str, Any] = {}
        if rule.momentum is not None:
            like = {"velocity": companion, "momentum": rule.momentum, "nesterov": rule.nesterov}
        elif rule.moment is not None:
            like = {"moment": (companion, rule.factors(self.dtype)[1:])}
        made = fold(self._values, step, decay=decay, **like)
        self._values = made.values
        if made.companion is not None:
            self.companions[0][:] = made.companion
        gradient[:] = 0
        self._folded = self._values.copy(), [companion.copy() for companion in self.companions]
        self._report = FoldReport(
            num_nonfinite=made.nonfinite.size,
            first_nonfinite=int(made.nonfinite[0]) if made.nonfinite.size else -1,
            square_norm=made.square_norm,
            carried_square_norm=carried,
            step=self.step,
        )
        return self._report

    def largest(self, num_selected: int, start: int = 0, stop: int | None = None) -> Indices:
        return largest(self._values, num_selected, start, stop)

    def largest_of_each(self, chunk: int, quotas: np.ndarray) -> Indices:
        starts = range(0, self.num_elements, chunk)
        pairs = zip(starts, quotas.tolist(), strict=True)
        return np.concatenate([self.largest(k, start, start + chunk) for start, k in pairs])

    def kth_magnitude(self, k: int, start: int = 0, stop: int | None = None) -> float:
        return float(np.sort(np.abs(self._values[start:stop]))[-k])

    def at_least(self, threshold: float, start: int = 0, stop: int | None = None) -> Indices:
        return at_least(self._values, threshold, start, stop)

    def count_at_least(self, thresholds: Any) -> np.ndarray:
        return np.array([self.at_least(float(threshold)).size for threshold in thresholds], np.int64)

    def moments(self, threshold: float = 0.0) -> Moments:
        sizes = np.abs(self._values[self.at_least(threshold)].astype(np.float64))
        return Moments(
            sizes.size, float(sizes.sum()), float(np.square(sizes).sum()), float(np.log(sizes).sum())
        )

    def sample_magnitudes(self, stride: int, offset: int = 0) -> Values:
        return np.abs(self._values[offset::stride])

    def take(self, indices: Indices) -> Values:
        return self._values[indices]

    def remove(self, indices: Indices, sent: Callable[[Values], Values] = lambda values: values) -> Values:
        values = self.take(indices).copy()
        self.clear(indices)
        rounded = values if sent is None else sent(values)
        self._values[indices] = values - rounded
        return rounded

    def clear(self, indices: Indices) -> None:
        for array in (self._values, *self._masked):
            array[indices] = 0

    def add(self, indices: Indices, values: Values) -> None:
        self._values[indices] += values

    def put(self, indices: Indices, values: Values) -> None:
        self._values[indices] = values

    def quantize(self, code: Quantization, key: int, words: np.ndarray) -> None:
        found = quantized(self._values, code, key)
        words[:] = packed(*found, code)
        self._quantized = self._values
        self._values = self._values - decoded(*found, code)

    def subtract(self, sent: Values) -> None:
        self._values = self._quantized - sent

    def mask(self, indices: Indices) -> None:
        for array in self._masked:
            array[indices] = 0

    def abandon(self) -> None:
        values, companions = self._folded
        self._values = values.copy()
        for companion, folded in zip(self.companions, companions, strict=True):
            companion[:] = folded

    def values(self) -> Values:
        return self._values

    def assign(self, values: Values) -> None:
        self._values[:] = values
        self._folded = self._values.copy(), [companion.copy() for companion in self.companions]
