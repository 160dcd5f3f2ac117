"""What every rank tells all others in rounds where messages meet only some of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays.protocol import FoldReport
from horovod_sparse.errors import MessageError

__all__ = ["WORDS_PER_NOTE", "Notes"]

#: position of what is not finite, and a norm
WORDS_PER_NOTE = 2


class Notes:
    """One row per rank: 1 + position of its first NaN or Inf (0: none), and its residual's norm.

    A rank begins with its own row. A message carries the rows of the ranks that both sides know to be
    known to the sender, so no row says whose it is, and lengths do not depend on the data. A row that
    arrives twice changes nothing.

    Args:
        report: of this rank's fold.
        rank: of this process.
        size: P.

    Example:
        >>> one, two = Notes(FoldReport(), 0, 2), Notes(FoldReport(1, first_nonfinite=7), 1, 2)
        >>> one.read(two.write([1]), [1])
        >>> one.first_nonfinite
        {1: 7}
    """

    def __init__(self, report: FoldReport, rank: int, size: int) -> None:
        self._rows = np.zeros((size, WORDS_PER_NOTE), np.int32)
        norm = min(math.sqrt(report.carried_square_norm), float(np.finfo(np.float32).max))
        self._rows[rank, 0] = report.first_nonfinite + 1
        self._rows[rank, 1:].view(np.float32)[0] = norm

    def write(self, ranks: Sequence[int]) -> NDArray[np.int32]:
        """The rows of some ranks, as words."""
        return self._rows[list(ranks)].reshape(-1)

    def read(self, words: NDArray[np.int32], ranks: Sequence[int]) -> None:
        """Takes in the rows of some ranks.

        Raises:
            MessageError: there are not as many words as that.
        """
        if words.size != WORDS_PER_NOTE * len(ranks):
            raise MessageError(
                f"{words.size} words arrived where the notes of {len(ranks)} ranks were awaited; "
                "all ranks must use the same version, sparsifier and arguments"
            )
        self._rows[list(ranks)] = words.reshape(-1, WORDS_PER_NOTE)

    @property
    def first_nonfinite(self) -> dict[int, int]:
        """Rank -> position of its first NaN or Inf, for ranks that have one."""
        return {int(rank): int(self._rows[rank, 0]) - 1 for rank in np.flatnonzero(self._rows[:, 0] > 0)}

    @property
    def norms(self) -> NDArray[np.float64]:
        """Of all ranks' residuals, as they began the step; [P]."""
        return np.ascontiguousarray(self._rows[:, 1]).view(np.float32).astype(np.float64)
