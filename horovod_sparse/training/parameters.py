"""The parameters of a bucket, as a rank's own moves and sums over ranks reach them: where they lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.arrays import GradientParts, Indices, Values, WeightedParts
from horovod_sparse.kernels.host import scatter, sparse_vectors
from horovod_sparse.sparsifiers import SparseSum


class Parameters:
    """The parameters of a bucket, one behind the other; positions count from the bucket's start.

    These are arrays of float32 or float64 on the host. Front ends derive from it where they are not.

    Args:
        places: [start, stop) of each.
        arrays: their memory, flat.
    """

    def __init__(self, places: Sequence[tuple[int, int]], arrays: Sequence[Any] = ()) -> None:
        self.places, self._stops = list(places), np.array([stop for _, stop in places])
        self._memory = list(arrays)

    def arrays(self) -> list[Any]:
        """Returns the parameters' own memory, flat."""
        return self._memory

    def after_write(self) -> None:
        """Called after the arrays have been changed."""

    def _by_parameter(self, indices: Indices) -> Iterator[tuple[Any, slice, Indices]]:
        """Yields the memory of each parameter that has some of the positions, which, and where in it."""
        cuts = itertools.pairwise([0, *np.searchsorted(indices, self._stops).tolist()])
        for array, (first, _), (start, stop) in zip(self.arrays(), self.places, cuts, strict=True):
            if start < stop:
                yield array, slice(start, stop), indices[start:stop] - np.int32(first)

    def take(self, indices: Indices) -> list[Any]:
        """Returns the values at ascending, unique positions, in the parameters' own type."""
        return [scatter.taken(array, where) for array, _, where in self._by_parameter(indices)]

    def replace(
        self,
        undone: Sequence[tuple[Indices, Any]] = (),
        shrunk: Mapping[float, Sequence[int]] | None = None,
        total: SparseSum | None = None,
        scale: float = 1.0,
        again: Sequence[tuple[Indices, Values]] = (),
    ) -> tuple[int, list[Any]]:
        """Puts values back, multiplies parameters, subtracts a sum over ranks, and moves, in this order.

        Args:
            undone: ascending, unique positions, and what stood there, as this method returned it.
            shrunk: factors, and the numbers of the parameters that each multiplies.
            total: the sum.
            scale: its factor.
            again: ascending, unique positions, and float32 or float64 values to subtract.

        Returns:
            At how many different positions the sum was, and what stood at those of `again` before each.
        """
        factor_of = {number: factor for factor, numbers in (shrunk or {}).items() for number in numbers}
        placed = [
            (array, start, factor_of.get(number, 1.0))
            for number, (array, (start, _)) in enumerate(zip(self.arrays(), self.places, strict=True))
        ]
        if total is None or not total.whole:
            given = None if total is None else (total.indices, scaled(total, scale))
            replaced = sparse_vectors.replace(placed, undone, given, again)
        else:
            sparse_vectors.replace(placed, undone)
            values, plain = scaled(total, scale), [(array, start, 1.0) for array, start, _ in placed]
            for (array, *_), place in zip(placed, self.places, strict=True):
                array -= values[slice(*place)]
            replaced = len(values), sparse_vectors.replace(plain, again=again)[1]
        self.after_write()
        return replaced

    def to_save(self, before: Any, array: Callable[[np.ndarray], Any]) -> Any:
        """Converts what stood somewhere for a checkpoint."""
        return array(before)

    def from_saved(self, saved: Any) -> Any:
        """Inverts `to_save`."""
        return np.array(saved)

    def foldable(self, gradients: Sequence[Any], weights: tuple[float, float]) -> Any:
        """Returns ``weights[0] gradient + weights[1] parameter`` for a fold; zeros without a gradient."""
        return folded(gradients, self.arrays(), weights)


def folded(
    gradients: Sequence[np.ndarray | None], arrays: Sequence[np.ndarray], weights: tuple[float, float]
) -> GradientParts:
    """Does what `Parameters.foldable` does with arrays, which may be of half types."""
    own = [np.zeros_like(two) if one is None else two for one, two in zip(gradients, arrays, strict=True)]
    given = [array if one is None else one for one, array in zip(gradients, own, strict=True)]
    return GradientParts(given) if weights == (1.0, 0.0) else WeightedParts(given, own, weights)


def scaled(total: SparseSum, scale: float) -> Any:
    """Returns a sum's values, an array or a tensor, times a factor; the very values for 1."""
    return total.values if scale == 1.0 else total.values * float(scale)
