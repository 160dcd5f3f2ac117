"""The primitives once more, plainly, in NumPy: what the fast kernels are tested against.

Everything here may be slow and may copy; nothing may be clever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Folded",
    "add_into",
    "at_least",
    "block_maxima",
    "count_at_least",
    "fold",
    "kth_magnitude",
    "largest",
    "moments_at_least",
    "widen",
]

Array = NDArray[Any]


@dataclass(frozen=True)
class Folded:
    """What a fold makes of its inputs.

    Attributes:
        values: shape (n,), the new accumulator.
        companion: shape (n,), velocity or moment; None without either.
        nonfinite: shape (k,), positions taken as 0, ascending.
        square_norm: sum of squares of values.
    """

    values: Array
    companion: Array | None
    nonfinite: Array
    square_norm: float


def widen(gradient: Array, kind: Any) -> Array:
    """A gradient of any supported type (uint16 holds bfloat16) in the accumulator's type.

    Args:
        gradient: shape (n,).
        kind: float32 or float64.

    Returns:
        shape (n,).
    """
    if gradient.dtype == np.uint16:
        return (gradient.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return gradient.astype(kind)


def fold(
    values: Array,
    gradient: Array,
    *,
    decay: float = 1.0,
    velocity: Array | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    moment: tuple[Array, Array] | None = None,
) -> Folded:
    """values = decay * values + gradient, or with momentum correction, or normalized.

    Args:
        values: float32 or float64, shape (n,), finite.
        gradient: shape (n,).
        decay: factor of the old values.
        velocity: shape (n,), for momentum correction.
        momentum: factor of the velocity.
        nesterov: add gradient + momentum * velocity instead of the velocity.
        moment: shape (n,), and four numbers: its factor, that of a square, the rate, eps.

    Returns:
        The new arrays; the given ones stay as they are.
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
    """The largest magnitude of every `block` neighbours.

    Args:
        values: shape (n,).
        block: elements per block.

    Returns:
        shape (ceil(n / block),).
    """
    return np.array([np.abs(values[i : i + block]).max() for i in range(0, values.size, block)], values.dtype)


def largest(values: Array, k: int, start: int, stop: int) -> Array:
    """Positions of the k largest magnitudes of a window, ascending; ties go to the lowest.

    Args:
        values: shape (n,).
        k: how many, at most.
        start: first position.
        stop: position after the last.

    Returns:
        shape (min(k, stop - start),).
    """
    order = np.argsort(-np.abs(values[start:stop]), kind="stable")
    return np.sort(order[:k]) + start


def kth_magnitude(values: Array, k: int, start: int, stop: int) -> float:
    """The k-th largest magnitude of a window.

    Args:
        values: shape (n,).
        k: rank, from 1.
        start: first position.
        stop: position after the last.

    Returns:
        The magnitude.
    """
    return float(np.sort(np.abs(values[start:stop]))[-k])


def at_least(values: Array, threshold: float, start: int, stop: int) -> Array:
    """Positions of a window whose magnitude is >= threshold and not 0.

    Args:
        values: shape (n,).
        threshold: magnitude.
        start: first position.
        stop: position after the last.

    Returns:
        Ascending positions.
    """
    sizes = np.abs(values[start:stop].astype(np.float64))
    return np.flatnonzero((sizes >= threshold) & (sizes > 0)) + start


def count_at_least(values: Array, thresholds: Array) -> Array:
    """How many magnitudes are >= each threshold and not 0.

    Args:
        values: shape (n,).
        thresholds: shape (m,).

    Returns:
        shape (m,).
    """
    return np.array([at_least(values, float(t), 0, values.size).size for t in thresholds], np.int64)


def moments_at_least(values: Array, threshold: float) -> Array:
    """Number, sum, sum of squares and sum of logarithms of the magnitudes >= threshold and not 0.

    Args:
        values: shape (n,).
        threshold: magnitude.

    Returns:
        float64, shape (4,).
    """
    sizes = np.abs(values[at_least(values, threshold, 0, values.size)].astype(np.float64))
    return np.array([sizes.size, sizes.sum(), (sizes * sizes).sum(), np.log(sizes).sum()])


def add_into(dense: Array, indices: Array, values: Array) -> tuple[Array, int]:
    """dense with values added at indices, one after the other, in the type of values.

    Args:
        dense: float32 or float64, shape (n,).
        indices: shape (k,), may repeat.
        values: shape (k,).

    Returns:
        The sum, and how many different elements held +0.0 before.
    """
    out = dense.copy()
    for index, value in zip(indices, values, strict=True):
        out[index] = out[index] + value
    touched = np.unique(indices)
    return out, int(((dense[touched] == 0) & ~np.signbit(dense[touched])).sum())
