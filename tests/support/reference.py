"""The primitives of an accumulator, plain and slow: the fast ones have the same bits."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.arrays import FoldRule

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

    With `moment` come five numbers: its factor, that of a square, the rate, eps, the floor.
    """
    kind = values.dtype.type
    with np.errstate(all="ignore"):
        step = widen(gradient, kind)
        wrong = ~np.isfinite(step)
        step[wrong] = 0
        speed = None
        if moment is not None:
            before, (lasting, fresh, rate, eps, floor) = moment
            speed = lasting * before + fresh * (step * step)
            wrong |= ~np.isfinite(speed)
            speed[wrong] = before[wrong]
            step = np.where(wrong, kind(0), rate * step / (np.sqrt(speed + floor) + eps))
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


def largest(values: Array, k: int, start: int, stop: int | None) -> Array:
    """Positions of the k largest magnitudes of a window, ascending; ties go to the lowest."""
    order = np.argsort(-np.abs(values[start:stop]), kind="stable")
    return np.sort(order[:k] + start).astype(np.int32)


def at_least(values: Array, threshold: float, start: int, stop: int | None) -> Array:
    """Positions of a window whose magnitude is >= threshold and not 0; no threshold is rounded to float32."""
    sizes = np.abs(values[start:stop].astype(np.float64))
    return (np.flatnonzero((sizes >= threshold) & (sizes > 0)) + start).astype(np.int32)


class Plain:
    """What histories leave of values and companions: each call in the most obvious way."""

    def __init__(self, num_elements: int, dtype: str, companions: int) -> None:
        self.arrays = [np.zeros(num_elements, dtype) for _ in range(1 + companions)]
        self.folded, self.masked = self.arrays, slice(1, None)

    @property
    def values(self) -> Array:
        return self.arrays[0]

    def fold(self, gradient: Array, rule: FoldRule) -> tuple[Folded, float]:
        """And the square norm of what was carried on."""
        decay, self.masked = rule.decay, slice(1, None if rule.masking else 1)
        like: dict[str, Any] = {}
        if rule.momentum is not None:
            like = {"velocity": self.arrays[1], "momentum": rule.momentum, "nesterov": rule.nesterov}
        elif rule.moment is not None:
            like = {"moment": (self.arrays[1], rule.factors(self.values.dtype)[1:])}
        carried = decay**2 * float(np.sum(np.square(self.values, dtype=np.float64)))
        made = fold(self.values, gradient, decay=decay, **like)
        others = self.arrays[1:] if made.companion is None else [made.companion, *self.arrays[2:]]
        self.arrays = [made.values, *others]
        self.folded = [array.copy() for array in self.arrays]
        return made, carried

    def change(self, name: str, *given: Array) -> Any:
        if name in ("clear", "mask"):
            for array in [*self.arrays[: name == "clear"], *self.arrays[self.masked]]:
                array[given[0]] = 0
        elif name in ("add", "put"):
            before = self.values[given[0]] if name == "add" else 0
            self.values[given[0]] = before + given[1]
        elif name == "take":
            return self.values[given[0]]
        else:
            if name == "assign":
                self.folded = [given[0], *self.arrays[1:]]
            self.arrays = [array.copy() for array in self.folded]
            self.folded = [array.copy() for array in self.folded]
        return None


def add_into(dense: Array, indices: Array, values: Array) -> tuple[Array, int]:
    """dense with values added at indices, one after the other; how many elements held +0.0 before."""
    out = dense.copy()
    for index, value in zip(indices, values, strict=True):
        out[index] = out[index] + value
    touched = np.unique(indices)
    return out, int(((dense[touched] == 0) & ~np.signbit(dense[touched])).sum())
