"""Scaling a gradient down to a norm, while it is folded; and taking one out again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host.scatter import narrow, native_bits, wide

if TYPE_CHECKING:
    from horovod_sparse.arrays.gradients import GradientParts

__all__ = ["check_norm", "clip_factor", "finite_norm", "scaled", "take_out", "wide"]

Array = NDArray[Any]

# Elements that are widened at a time: they stay in the cache between their uses.
_CHUNK = 1 << 16


def check_norm(norm: float) -> None:
    """Refuses a norm that nothing can be scaled to.

    Raises:
        ArgumentError: it is not above 0.
    """
    if not norm > 0.0:
        raise ArgumentError("clip_norm", norm, "a norm above 0")


def clip_factor(gradient: Array | GradientParts, clip_norm: float) -> float:
    """``min(1, clip_norm / norm)``, the norm being that of the finite elements.

    Args:
        gradient: as `gradients.checked_gradient` returns it. Not changed.
        clip_norm: above 0.

    Raises:
        ArgumentError: clip_norm is not above 0.

    Example:
        >>> clip_factor(np.array([3.0, np.nan, 4.0], np.float32), 1.0)
        0.2
    """
    check_norm(clip_norm)
    norm = finite_norm(gradient)
    return 1.0 if norm <= clip_norm else clip_norm / norm


def finite_norm(gradient: Array | GradientParts) -> float:
    """L2 norm of the finite elements, also where squares would overflow or vanish.

    Args:
        gradient: as `gradients.checked_gradient` returns it. Not changed.

    Example:
        >>> round(finite_norm(np.array([3e30, np.inf, 4e30], np.float32)) / 1e30, 5)
        5.0
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        total = sum(float(np.dot(chunk, chunk)) for chunk in _chunks(gradient))
        if 1e-30 < total < math.inf:
            return math.sqrt(total)
        top = max((_top(chunk) for chunk in _chunks(gradient)), default=0.0)
        if top == 0.0:
            return 0.0
        total = 0.0
        for chunk in _chunks(gradient):
            shares = np.where(np.isfinite(chunk), chunk, 0).astype(np.float64) / top
            total += float(np.dot(shares, shares))
    return top * math.sqrt(total)


def scaled(
    pieces: Iterable[tuple[int, Array]], factor: float, *, keep: bool = False
) -> Iterator[tuple[int, Array]]:
    """The pieces of a gradient, multiplied as they come; NaN and Inf stay what they are.

    Args:
        pieces: of `gradients.pieces`, each starting at a multiple of the block size.
        factor: of all elements; 1 changes nothing.
        keep: leave the memory as it is, and give copies.
    """
    if factor == 1.0:
        yield from pieces
        return
    for start, piece in pieces:
        for first in range(0, piece.size, _CHUNK):
            chunk = piece[first : first + _CHUNK]
            large = wide(chunk)
            small = narrow(large * large.dtype.type(factor), chunk.dtype)
            if keep:
                yield start + first, small
            else:
                chunk[:] = small
        if not keep:
            yield start, piece


def take_out(values: Array, step: Array) -> None:
    """``values -= step``, where a fold has added it: what is not finite, or was not then, it has left out.

    Args:
        values: finite; changed.
        step: of the same type and shape.

    Example:
        >>> values = np.array([3.0, 1.0, 2.0])
        >>> take_out(values, np.array([1.0, np.inf, 2.0])); values
        array([2., 1., 0.])
    """
    with np.errstate(over="ignore", invalid="ignore"):
        without = values - step
        # a sum that overflows now may have done so then, when nothing was added
        left_out = ~np.isfinite(values + step) & (np.abs(without) > np.abs(values))
    values[...] = np.where(np.isfinite(without) & ~left_out, without, values)


def _chunks(gradient: Array | GradientParts) -> Iterator[Array]:
    if not isinstance(gradient, np.ndarray):
        for _, piece in gradient.pieces(_CHUNK, 1):
            for start in range(0, piece.size, _CHUNK):
                yield wide(piece[start : start + _CHUNK])
        return
    array = np.ascontiguousarray(gradient)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    flat = native_bits(array)
    for start in range(0, flat.size, _CHUNK):
        yield wide(flat[start : start + _CHUNK])


def _top(chunk: Array) -> float:
    return float(np.abs(chunk).max(where=np.isfinite(chunk), initial=0.0))
