"""SparDL's global residual collection: what was discarded, where, and what of it is kept."""

from __future__ import annotations

import numpy as np

from horovod_sparse.arrays.protocol import Accumulator, Indices, Values
from horovod_sparse.sparsifiers.mail import rounded
from horovod_sparse.sparsifiers.sparse_vectors import SparseVector, missing_in, shared_out
from horovod_sparse.wire import WireFormat

__all__ = ["RESIDUAL_MODES", "Ledger", "discards_meet"]

RESIDUAL_MODES = ("global", "partial", "local")
#: 2**32 divided by the golden ratio: its multiples lie evenly, at whichever distance they are taken
_GOLDEN = 2654435769


def discards_meet(step: int) -> bool:
    """Whether what a step discards stays with the ranks that dropped it: in one of 16 steps.

    Discards that go back to where they came from never meet. Where the gradients of two ranks cancel, as
    those of ranks with different data do in the end, both ranks would choose that element for ever, and hold
    back ever more of it, and what grows more slowly would never have its turn. Where they meet they cancel.

    The steps keep time with nothing, so that every block that has its turn now and then has it in some of
    them.

    Example:
        >>> [step for step in range(80) if discards_meet(step)]
        [12, 33, 46, 67]
    """
    return (step + 1) * _GOLDEN % 2**32 < 2**28


class Ledger:
    """Every change of a rank's accumulator in one step, so that it can be settled at the end.

    While the step runs, the accumulator holds this rank's blocks as they are summed up: what is selected
    leaves it, what arrives is added, and what is discarded is simply what remains. Three kinds of
    discards remain, in the paper's words: *local* (never sent), *end-procedure* (sent or received, at
    an index that is not in the final sum) and *in-procedure* (received and dropped, at an index that
    came to the final sum by another way). `settle` does what Algorithm 1 does in its lines 11 to 13.

    Args:
        accumulator: of this rank.
        wire: how values are written.
    """

    def __init__(self, accumulator: Accumulator, wire: WireFormat) -> None:
        self._accumulator, self._wire = accumulator, wire
        self._changes: list[tuple[Indices, Values]] = []
        self._selected: list[Indices] = []
        self._rounding: list[SparseVector] = []

    def select(self, indices: Indices) -> SparseVector:
        """Takes the selection of a block, or of several, out of the accumulator."""
        values = self._accumulator.take(indices)
        self._changes.append((indices, values))
        self._selected.append(indices)
        self._accumulator.put(indices, np.zeros_like(values))
        return SparseVector(indices, values)

    def receive(self, vector: SparseVector) -> None:
        """Adds what another rank of the team has sent."""
        self._changes.append((vector.indices, self._accumulator.take(vector.indices)))
        self._accumulator.add(vector.indices, vector.values)

    def discard(self, vector: SparseVector, num_holders: int = 1, holder: int = 0) -> None:
        """Keeps this rank's share of what it has dropped, as so many ranks have that hold the same."""
        if len(vector):
            self.receive(SparseVector(vector.indices, shared_out(vector.values, num_holders, holder)))

    def round(self, vector: SparseVector, num_holders: int = 1, holder: int = 0) -> SparseVector:
        """The vector as receivers will see it; this rank's share of the rounding error is kept."""
        seen, error = rounded(vector, self._wire)
        if error is not None:
            share = SparseVector(vector.indices, shared_out(error, num_holders, holder))
            self._rounding.append(share)
            self.receive(share)
        return seen

    def settle(self, final: Indices, mode: str, *, in_place: bool = False) -> None:
        """Leaves in the accumulator what is to be carried to the next step.

        Args:
            final: ascending indices of the final sum.
            mode: "global": local and end-procedure discards stay at the rank they came from, in-procedure
                ones at the rank that dropped them; nothing is lost. "partial": in-procedure discards are
                lost. "local": only what was never sent is kept. Rounding errors stay in all modes.
            in_place: whether "global" keeps every discard at the rank that dropped it.

        The velocity of momentum correction is masked where this rank's own value has left it for good, and
        nowhere else: not where the value came back, and not where it only passed through.
        """
        if mode == "global":
            for indices, before in [] if in_place else reversed(self._changes):
                unsent = missing_in(indices, final)
                self._put(indices[unsent], before[unsent])
            for indices in self._selected:
                self._accumulator.mask(indices[~missing_in(indices, final)])
            return
        for indices, before in reversed(self._changes):
            self._put(indices, before)
        for indices in self._selected:
            self._accumulator.clear(indices if mode == "local" else indices[~missing_in(indices, final)])
        for error in self._rounding:
            applied = ~missing_in(error.indices, final)
            self._accumulator.add(error.indices[applied], error.values[applied])

    def _put(self, indices: Indices, values: Values) -> None:
        """Exactly these values: a sum less what was added to it need not be what it was."""
        if indices.size:
            self._accumulator.put(indices, np.ascontiguousarray(values))
