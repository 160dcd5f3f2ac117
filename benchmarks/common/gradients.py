"""Gradients for a measurement: as many as are asked for, made anew before every step, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: how far the window into the numbers drawn beforehand can move
_SLACK = 1 << 20


def random_layers(num_elements: int, seed: int = 0) -> list[int]:
    """Returns random sizes of layers that add up to n: log-uniform from 1 000 to 2.5 million elements.

    Example:
        >>> sum(random_layers(5_000_000))
        5000000
    """
    generator, sizes, left = np.random.default_rng(seed), list[int](), num_elements
    while left:
        sizes.append(min(left, int(10 ** generator.uniform(3, 6.4))))
        left -= sizes[-1]
    return sizes


class GradientSource:
    """Draws the gradients of one rank.

    Element j of layer l is ``scale_l * x_j`` with x_j from a Laplace distribution, independent between
    ranks and steps; scales are the same on all ranks, and spread over one and a half orders of
    magnitude. Gradients of real ranks are more alike than independent ones, so the build-up of
    selections is at its largest here.

    Args:
        sizes: of the layers.
        rank: draws its own numbers.
        seed: of everything.
    """

    def __init__(self, sizes: Sequence[int], rank: int, seed: int = 0) -> None:
        stops = np.cumsum(sizes)
        self._spans = [(int(stop) - size, int(stop)) for size, stop in zip(sizes, stops, strict=True)]
        shared = np.random.default_rng([seed, 0])
        self._scales = (10 ** shared.normal(-3, 0.5, len(sizes))).astype(np.float32)
        self._own = np.random.default_rng([seed, 1, rank])
        self.num_elements = int(stops[-1])
        self._drawn = np.empty(self.num_elements + _SLACK, np.float32)
        for start in range(0, self._drawn.size, _SLACK):
            piece = self._drawn[start : start + _SLACK]
            self._own.standard_normal(out=piece, dtype=np.float32)
            # a Laplace number is a Gaussian one times the root of twice an exponential one
            piece *= np.sqrt(2 * self._own.standard_exponential(piece.size, dtype=np.float32))

    def fill(self, gradient: NDArray[np.float32]) -> None:
        """Writes the next gradient, as backward would."""
        offset = int(self._own.integers(_SLACK))
        for (start, stop), scale in zip(self._spans, self._scales, strict=True):
            np.multiply(self._drawn[offset + start : offset + stop], scale, out=gradient[start:stop])
