"""The fold with checked arguments, in as many pieces as the gradient comes in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels.host_fold import fold_plain
from horovod_sparse.kernels.host_fold_momentum import fold_momentum
from horovod_sparse.kernels.layout import Layout

__all__ = ["Folded", "fold", "fold_factors"]

Array = NDArray[Any]


class Folded(NamedTuple):
    """What a fold learned.

    Attributes:
        num_nonfinite: elements that were taken as 0.
        first_nonfinite: position of the first, -1 if there is none.
        square_norm: sum of squares of the new values.
    """

    num_nonfinite: int
    first_nonfinite: int
    square_norm: float


def fold_factors(dtype: Any, decay: float, momentum: float, nesterov: bool) -> Array:
    """The four factors of a fold: decay, momentum, and what gradient and velocity add to the values.

    Args:
        dtype: of the values.
        decay: factor of the old values.
        momentum: factor of the old velocity.
        nesterov: add gradient + momentum * velocity, not the velocity.

    Returns:
        shape (4,).
    """
    return np.array([decay, momentum, *((1.0, momentum) if nesterov else (0.0, 1.0))], dtype)


def fold(
    values: Array,
    pieces: Iterable[tuple[int, Array]],
    maxima: Array,
    layout: Layout,
    factors: Array,
    velocity: Array | None = None,
    *,
    keep_gradient: bool = False,
) -> Folded:
    """values = decay * values + gradient (or momentum's step); gradient = 0; maxima of blocks.

    Args:
        values: float32 or float64, shape (n,), finite; changed.
        pieces: start and memory of each piece of the gradient, all but the last multiples of the block
            size, in a form the kernels know (`native_bits`); changed.
        maxima: shape (layout.num_blocks,); overwritten.
        layout: of the blocks.
        factors: of `fold_factors`; without a velocity only the decay counts.
        velocity: shape (n,), for momentum correction; changed.
        keep_gradient: leaves the pieces as they are.

    Returns:
        What was learned on the way.
    """
    count, first, square_norm = 0, -1, 0.0
    block, kept = layout.block, True if keep_gradient else None
    for start, piece in pieces:
        stop = start + piece.size
        report = np.array([0.0, -1.0, 0.0])
        tops = maxima[start // block : -(-stop // block)]
        if velocity is None:
            fold_plain(values[start:stop], piece, tops, block, factors[0], report, kept)
        else:
            fold_momentum(values[start:stop], velocity[start:stop], piece, tops, block, factors, report, kept)
        if first < 0 <= report[1]:
            first = start + int(report[1])
        count += int(report[0])
        square_norm += float(report[2])
    return Folded(count, first, square_norm)
