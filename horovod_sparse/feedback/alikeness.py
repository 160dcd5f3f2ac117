"""How alike the ranks' gradients are, and so how long the whole batch's steps: the s of `AdamFeedback`.

In every step all ranks draw the same random signs, and each tells, in spare bits of its message, how far its
gradient leans along them. The squared mean of what they tell estimates the mean gradient's square, and the
mean of squares that of one rank's: both up to the same factor, averaged over steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.arrays import Accumulator, FoldRule
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.sparsifiers.base import step_generator

#: elements whose signs are drawn in a step; how much this step counts beside those before, which is as one
#: that leans so many times as far, squared, at most
_SAMPLE, _NEWS, _MOST = 4096, 0.03, 10.0


class Alikeness:
    """Of the gradients of a bucket: learns it, and says what follows; the estimate is in `Progress.leans`."""

    def __init__(self, info: BucketInfo) -> None:
        self._info = info

    def longer(self, leans: tuple[float, float]) -> float:
        """By how much steps of the whole batch are longer than one rank's: at most sqrt(P).

        Example:
            >>> [Alikeness(BucketInfo("b", 9, size=4)).longer(leans) for leans in ((0.0, 0.0), (0.1, 1.0))]
            [1.0, 2.0]
        """
        mean, own = leans
        return max(mean / own, 1.0 / self._info.size) ** -0.5 if own else 1.0

    def fold(self, accumulator: Accumulator, gradient: Any, rule: FoldRule, step: int) -> None:
        """Folds what is normalized; the report says how far it leans along signs that ranks share."""
        n = self._info.num_elements
        drawn = step_generator(0, self._info.name, step).integers(0, 2 * n, min(n, _SAMPLE))
        accumulator.fold_along(gradient, rule, (drawn >> 1).astype(np.int32), np.where(drawn & 1, 1.0, -1.0))

    def learned(self, leans: tuple[float, float], told: np.ndarray) -> tuple[float, float]:
        """The estimate after another step, in which ranks have told [P] how far their gradients lean."""
        squares = float(told.mean()) ** 2, float(np.square(told).mean())
        # in the beginning steps are one rank's
        known = leans if any(leans) else (squares[1], squares[1])
        # one bad batch would rule for hundreds of steps
        part = _NEWS * min(1.0, _MOST * known[1] / squares[1])
        mean, own = ((1 - _NEWS) * old + part * now for old, now in zip(known, squares, strict=True))
        return mean, own
