"""A plain, slow `Accumulator`: what the fast ones are compared with, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.arrays import FoldReport, FoldRule, Indices, Moments, Values
from horovod_sparse.kernels.quantization import Quantization
from support.quantizers_reference import decoded, packed, quantized, unpacked

__all__ = ["ReferenceAccumulator"]


def widen(gradient: np.ndarray, dtype: np.dtype[Any]) -> Values:
    """A gradient in the accumulator's dtype; uint16 holds the bits of bfloat16, int16 those of float16."""
    if gradient.dtype == np.uint16:
        return (gradient.astype(np.uint32) << 16).view(np.float32).astype(dtype)
    if gradient.dtype == np.int16:
        return gradient.view(np.float16).astype(dtype)
    return gradient.astype(dtype)


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
        old, one = self._values, self.dtype.type
        decay, momentum = rule.decay * rule.keep_residual, rule.momentum
        self._masked = self.companions if rule.masking else ()
        carried = decay**2 * self.square_norm
        step = widen(gradient, self.dtype)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if rule.clip_norm is not None:
                step = clipped(step, rule.clip_norm)
            bad = ~np.isfinite(step)
            if momentum is not None:
                velocity = self.companions[0]
                step = np.where(bad, one(0), step)
                speed = one(momentum) * velocity + step
                bad |= ~np.isfinite(speed)
                velocity[:] = np.where(np.isfinite(speed), speed, one(momentum) * velocity)
                step = step + one(momentum) * velocity if rule.nesterov else velocity
            if rule.moment is not None:
                (moment,), (_, lasting, fresh, rate, eps) = self.companions, rule.factors(self.dtype)
                square = lasting * moment + fresh * (step * step)
                bad |= ~np.isfinite(square)
                moment[:] = np.where(bad, moment, square)
                step = np.where(bad, one(0), rate * step / (np.sqrt(moment) + eps))
            kept = one(decay) * old
            new = kept + step
        bad |= ~np.isfinite(new)
        self._values = np.where(np.isfinite(new), new, np.where(np.isfinite(kept), kept, old))
        gradient[:] = 0
        self._folded = self._values.copy(), [companion.copy() for companion in self.companions]
        self._report = FoldReport(
            num_nonfinite=int(bad.sum()),
            first_nonfinite=int(np.argmax(bad)) if bad.any() else -1,
            square_norm=float(np.sum(np.square(self._values, dtype=np.float64))),
            carried_square_norm=carried,
            step=self.step,
        )
        return self._report

    def _window(self, start: int, stop: int | None) -> np.ndarray:
        return np.abs(self._values[start:stop])

    def largest(self, num_selected: int, start: int = 0, stop: int | None = None) -> Indices:
        order = np.argsort(-self._window(start, stop), kind="stable")
        return np.sort(order[:num_selected] + start).astype(np.int32)

    def largest_of_each(self, chunk: int, quotas: np.ndarray) -> Indices:
        starts = range(0, self.num_elements, chunk)
        pairs = zip(starts, quotas.tolist(), strict=True)
        return np.concatenate([self.largest(k, start, start + chunk) for start, k in pairs])

    def kth_magnitude(self, k: int, start: int = 0, stop: int | None = None) -> float:
        return float(np.sort(self._window(start, stop))[-k])

    def at_least(self, threshold: float, start: int = 0, stop: int | None = None) -> Indices:
        magnitudes = self._window(start, stop).astype(np.float64)  # exact: no threshold is rounded to float32
        return (np.flatnonzero((magnitudes >= threshold) & (magnitudes > 0)) + start).astype(np.int32)

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

    def remove(self, indices: Indices) -> Values:
        values = self.take(indices).copy()
        self.clear(indices)
        return values

    def clear(self, indices: Indices) -> None:
        for array in (self._values, *self._masked):
            array[indices] = 0

    def add(self, indices: Indices, values: Values) -> None:
        self._values[indices] += values

    def put(self, indices: Indices, values: Values) -> None:
        self._values[indices] = values

    def quantize(self, code: Quantization, key: int, words: np.ndarray) -> float:
        found = quantized(self._values, code, key)
        words[:] = packed(*found, code)
        return float(np.square(self._values - decoded(*found, code), dtype=np.float64).sum())

    def subtract(self, code: Quantization, words: np.ndarray, left: float | None = None) -> None:
        sent = unpacked(words, self.num_elements, code, self.dtype)
        self._values = self._values - sent

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
