"""Changes of an accumulator's tensors since the last fold, and how they are taken back."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from horovod_sparse.kernels.layout import Layout


def sum_of_squares(values: Tensor) -> Tensor:
    """Sum of squares: float64, shape (1,), on the device."""
    return torch.linalg.vector_norm(values, dtype=torch.float64).square().view(1)


@dataclass(frozen=True)
class _Change:
    """What stood at some places before they were changed."""

    indices: Tensor
    values: Tensor
    companions: tuple[Tensor, ...]


class Journal:
    """Makes changes that can be taken back, and keeps the sum of squares along.

    Args:
        kernels: what carries them out.
        values: n elements.
        companions: like values; cleared with them, or the first follows them.
    """

    def __init__(self, kernels: ModuleType, values: Tensor, companions: tuple[Tensor, ...]) -> None:
        self._kernels, self._values, self._companions = kernels, values, companions
        self._changes: list[_Change] = []
        self._masking = True
        #: the companion that changes as the values do, and is what is held back; None: the values are
        self.followed: Tensor | None = None
        # Changes up to here are in the block maxima; those after only keep them upper bounds.
        self._refreshed = 0
        self._start_norm = self.square_norm = sum_of_squares(values)

    def restart(
        self, square_norm: Tensor | None = None, masking: bool = True, followed: Tensor | None = None
    ) -> None:
        """Forgets all changes: what is held back is new, and so is its sum of squares (computed if left out).

        Args:
            square_norm: float64, shape (1,).
            masking: whether companions are cleared with the values from now on.
            followed: the companion that follows them instead.
        """
        self._masking, self.followed = masking and followed is None, followed
        self._changes.clear()
        self._refreshed = 0
        self._start_norm = self.square_norm = (
            sum_of_squares(self._values if followed is None else followed)
            if square_norm is None
            else square_norm
        )

    def settle(self, square_norm: Tensor) -> None:
        """What has changed so far stays, since values have changed everywhere.

        Args:
            square_norm: of what is held back now.
        """
        self._changes.clear()
        self._refreshed = 0
        self.square_norm = square_norm

    def take_norm_back(self) -> None:
        """The sum of squares as it was after the fold."""
        self.square_norm = self._start_norm

    def norm_before(self, followed: Tensor | None) -> Tensor:
        """Sum of squares of what was held back until now, for a fold after which `followed` holds it."""
        if followed is self.followed:
            return self.square_norm
        return sum_of_squares(self._values if followed is None else followed)

    def _follow(self, indices: Tensor, change: Tensor) -> None:
        if self.followed is not None:
            self._kernels.add(self.followed, indices, change)

    def _renorm(self, change: _Change, new: Tensor | None = None) -> None:
        """Keeps the sum of squares along; `new` are the values there now, None for zeros."""
        old = change.values
        if self.followed is not None:
            old, new = change.companions[0], self.followed[change.indices.long()]
        norm = (self.square_norm - sum_of_squares(old)).clamp_(min=0.0)
        self.square_norm = norm if new is None else norm + sum_of_squares(new)

    def clear(self, indices: Tensor) -> None:
        """Sets values, and companions if there is masking, to 0 there."""
        old = self._kernels.clear(self._values, indices)
        companions = tuple(
            self._kernels.clear(companion, indices) if self._masking else companion[indices.long()]
            for companion in self._companions
        )
        self._changes.append(change := _Change(indices, old, companions))
        self._follow(indices, -old)
        if indices.numel() < self._values.numel():
            self._renorm(change)
        elif self.followed is not None:
            self.square_norm = sum_of_squares(self.followed)
        else:
            # All of them: 0 exactly, not the rounding of the fold's sum.
            self.square_norm = torch.zeros_like(self.square_norm)

    def add(self, indices: Tensor, new: Tensor) -> None:
        """Adds to the values there, and to what follows them; indices are unique."""
        old = self._kernels.add(self._values, indices, new)
        companions = tuple(companion[indices.long()] for companion in self._companions)
        self._changes.append(change := _Change(indices, old, companions))
        self._follow(indices, new)
        self._renorm(change, old + new)

    def put(self, indices: Tensor, new: Tensor) -> None:
        """Replaces the values there, and lets a companion follow; indices are unique."""
        old = self._values[indices.long()]
        self._kernels.put(self._values, indices, new)
        companions = tuple(companion[indices.long()] for companion in self._companions)
        self._changes.append(change := _Change(indices, old, companions))
        # one after the other: the difference of two large values need not be finite
        self._follow(indices, -old)
        self._follow(indices, new)
        self._renorm(change, new)

    def mask(self, indices: Tensor) -> None:
        """Sets companions to 0 there, if there is masking."""
        if self._masking:
            values = self._values[indices.long()]
            companions = tuple(self._kernels.clear(companion, indices) for companion in self._companions)
            self._changes.append(_Change(indices, values, companions))

    def refresh(self, maxima: Tensor, layout: Layout) -> None:
        """Makes upper bounds of the block maxima exact again."""
        for change in self._changes[self._refreshed :]:
            self._kernels.refresh_maxima(self._values, maxima, layout, change.indices)
        self._refreshed = len(self._changes)

    def abandon(self, maxima: Tensor | None, layout: Layout) -> None:
        """Takes every change back, bit for bit; block maxima become exact."""
        for change in reversed(self._changes):
            self._kernels.put(self._values, change.indices, change.values)
            for companion, old in zip(self._companions, change.companions, strict=True):
                self._kernels.put(companion, change.indices, old)
        if maxima is not None:
            for change in self._changes:
                self._kernels.refresh_maxima(self._values, maxima, layout, change.indices)
        if self._changes:
            self.restart(self._start_norm, self._masking, self.followed)
