"""What stood where, before a step changed it: so that the step can be taken back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays.protocol import Indices, Values
from horovod_sparse.kernels import host_scatter

__all__ = ["Journal"]


@dataclass(frozen=True)
class _Change:
    indices: Indices
    olds: tuple[Values, ...]


class Journal:
    """The changes of single elements since the last fold, in k-sized memory.

    Args:
        arrays: what changes together, each of shape (n,) and of one type.
    """

    def __init__(self, arrays: tuple[NDArray[Any], ...]) -> None:
        self._arrays = arrays
        self._changes: list[_Change] = []
        self._seen = 0

    def remember(self, indices: Indices) -> tuple[Values, ...]:
        """Notes what stands at some places, just before it is changed.

        Args:
            indices: int32, shape (k,), checked.

        Returns:
            What stands there in each of the arrays, shape (k,).
        """
        olds = []
        for array in self._arrays:
            old = np.empty(indices.size, array.dtype)
            host_scatter.take_at(array, indices, old)
            olds.append(old)
        # A copy: the caller may reuse its array, and the journal must not change with it.
        self._changes.append(_Change(indices.copy(), tuple(olds)))
        return self._changes[-1].olds

    def unseen(self) -> Iterator[Indices]:
        """The places of all changes that no earlier call has given out."""
        first, self._seen = self._seen, len(self._changes)
        for change in self._changes[first:]:
            yield change.indices

    def undo(self) -> list[Indices]:
        """Restores every array bit for bit, the last change first, and forgets.

        Returns:
            The places that changed.
        """
        for change in reversed(self._changes):
            for array, old in zip(self._arrays, change.olds, strict=True):
                host_scatter.put_at(array, change.indices, old)
        places = [change.indices for change in self._changes]
        self.forget()
        return places

    def forget(self) -> None:
        """Drops everything: what changed stays changed."""
        self._changes.clear()
        self._seen = 0
