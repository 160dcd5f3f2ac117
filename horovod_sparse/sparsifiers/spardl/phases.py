"""The phases of SparDL as coroutines, and the ledger from which residuals are computed."""

from __future__ import annotations

import numpy as np

from horovod_sparse.arrays import Accumulator, Indices, Values
from horovod_sparse.collectives import Exchange, Synchronization
from horovod_sparse.sparsifiers.base import BucketInfo, SparseSum, exchange_selections
from horovod_sparse.sparsifiers.rounds.pairs import Mail, bruck_all_gather
from horovod_sparse.sparsifiers.rounds.sparse_vectors import SparseVector, not_among, split_exactly
from horovod_sparse.sparsifiers.spardl.teams import TeamLayout
from horovod_sparse.wire import WireFormat

RESIDUAL_MODES = ("global", "partial", "local")


class Ledger:
    """Records every change of a rank's accumulator in a step, to compute the residual at its end.

    During a step, selected values leave the accumulator, received values are added, and discarded values
    remain. The paper calls these *local* (never sent), *end-procedure* (sent or received, at an index outside
    the final sum) or *in-procedure* (received and dropped, at an index that entered the final sum by another
    way). `settle` carries out lines 11 to 13 of Algorithm 1.
    """

    def __init__(self, accumulator: Accumulator, wire: WireFormat) -> None:
        self._accumulator, self._wire = accumulator, wire
        self._changes: list[tuple[Indices, Values]] = []
        self._selected: list[Indices] = []
        self._rounding: list[SparseVector] = []

    def select(self, indices: Indices) -> SparseVector:
        values = self._accumulator.take(indices)
        self._changes.append((indices, values))
        self._selected.append(indices)
        self._accumulator.put(indices, np.zeros_like(values))
        return SparseVector(indices, values)

    def receive(self, vector: SparseVector) -> None:
        """Adds a vector from another rank to the accumulator."""
        self._changes.append((vector.indices, self._accumulator.take(vector.indices)))
        self._accumulator.add(vector.indices, vector.values)

    def discard(self, vector: SparseVector, num_holders: int = 1, holder: int = 0) -> None:
        """Adds dropped values to the residual, or a share of them if `num_holders` ranks drop the same."""
        if len(vector):
            self.receive(SparseVector(vector.indices, split_exactly(vector.values, num_holders, holder)))

    def round(self, vector: SparseVector, num_holders: int = 1, holder: int = 0) -> SparseVector:
        """Returns a vector rounded for the wire; this rank's share of the errors stays in its residual."""
        seen, error = vector.rounded(self._wire)
        if error is not None:
            share = SparseVector(vector.indices, split_exactly(error, num_holders, holder))
            self._rounding.append(share)
            self.receive(share)
        return seen

    def settle(self, final: Indices, mode: str, *, in_place: bool = False) -> None:
        """Writes the residual for the next step into the accumulator, at the end of a step.

        "global": a rank's own discarded values return to it; partial sums stay with the rank that dropped
        them (with `in_place`, all values do). "partial": dropped partial sums are lost. "local": only values
        never sent are kept. Rounding errors stay. Masks the velocity where this rank's value was applied.
        """
        if mode == "global":
            for indices, before in [] if in_place else reversed(self._changes):
                unsent = not_among(indices, final)
                self._restore(indices[unsent], before[unsent])
            for indices in self._selected:
                self._accumulator.mask(indices[~not_among(indices, final)])
            return
        for indices, before in reversed(self._changes):
            self._restore(indices, before)
        for indices in self._selected:
            self._accumulator.clear(indices if mode == "local" else indices[~not_among(indices, final)])
        for error in self._rounding:
            applied = ~not_among(error.indices, final)
            self._accumulator.add(error.indices[applied], error.values[applied])

    def _restore(self, indices: Indices, values: Values) -> None:
        """Writes the accumulator's earlier values back in `settle`, since subtraction would not be exact."""
        if indices.size:
            self._accumulator.put(indices, np.ascontiguousarray(values))


class Phases:
    """The collectives of a step of SparDL on one rank, in order."""

    def __init__(
        self, accumulator: Accumulator, info: BucketInfo, layout: TeamLayout, wire: WireFormat
    ) -> None:
        self.ledger = Ledger(accumulator, wire)
        self._accumulator, self._info, self._layout, self._wire = accumulator, info, layout, wire
        self._mail = Mail(accumulator.report, info, wire)
        self._team, self._position = layout.team_and_position(info.rank)

    def scatter_reduce(self) -> Synchronization[SparseVector]:
        """Spar-Reduce-Scatter: returns the largest elements of this team's sum of this rank's block.

        In each stage, from the longest distance to the shortest, a rank sends one bag of blocks and receives
        one. It sparsifies a block, to which it has added all received values, just before sending it.
        """
        layout, team, position = self._layout, self._team, self._position
        for stage in reversed(range(layout.num_stages)):
            distance = 1 << stage
            message = self._mail.write(self.ledger.round(self._take_largest(layout.bag(position, stage))))
            target, source = layout.rank(team, position + distance), layout.rank(team, position - distance)
            arrived = yield Exchange({target: message}, (source,))
            self.ledger.receive(self._mail.read(arrived[source]))
        return self._take_largest([position])

    def _take_largest(self, blocks: list[int]) -> SparseVector:
        """Takes the largest elements of each block, `quota` of them, out of the accumulator."""
        chosen = [
            self._accumulator.largest(self._layout.quota(block), *self._layout.window(block))
            for block in sorted(blocks)
        ]
        return self.ledger.select(chosen[0] if len(chosen) == 1 else np.concatenate(chosen))

    def recursive_doubling(self, block: SparseVector) -> Synchronization[SparseVector]:
        """R-SAG: returns the sum over 2**m teams of this rank's block.

        Before stage t, 2**t teams hold the same sum. Both sides add the same two, so they keep and drop
        the same; each of the 2**(t + 1) teams that now agree keeps its share of what was dropped.
        """
        layout, team = self._layout, self._team
        quota, num_alike = layout.quota(self._position), 1
        while num_alike < layout.teams:
            block = self.ledger.round(block, num_alike, team % num_alike)
            ours = team - team % num_alike
            known = self._ranks_with_notes(range(ours, ours + num_alike))
            theirs = ours ^ num_alike
            arriving = self._ranks_with_notes(range(theirs, theirs + num_alike))
            other = layout.rank(team ^ num_alike, self._position)
            arrived = yield Exchange({other: self._mail.write(block, known)}, (other,))
            total = block + self._mail.read(arrived[other], arriving)
            num_alike *= 2
            block, dropped = total.split_largest(quota)
            self.ledger.discard(dropped, num_alike, team % num_alike)
        return block

    def bruck(self, block: SparseVector, num_sent: int) -> Synchronization[tuple[SparseVector, int]]:
        """B-SAG: returns the sum over teams of the `num_sent` largest elements of each team's block."""
        layout, team = self._layout, self._team
        column = layout.column(self._position)
        block, dropped = block.split_largest(num_sent)
        self.ledger.discard(dropped)
        message = self._mail.write(self.ledger.round(block), self._ranks_with_notes([team]))
        messages = yield from bruck_all_gather(message, column, team)
        total = self._mail.read(messages[0], self._ranks_with_notes([0]))
        for other in range(1, layout.teams):
            total += self._mail.read(messages[other], self._ranks_with_notes([other]))
        kept, dropped = total.split_largest(layout.quota(self._position))
        self.ledger.discard(dropped, layout.teams, team)
        return kept, len(total)

    def _ranks_with_notes(self, teams: range | list[int]) -> list[int]:
        """Returns the ranks whose notes a message carries: those at this rank's position in these teams."""
        return [self._layout.rank(team, self._position) for team in teams]

    def gather_within_team(self, block: SparseVector) -> Synchronization[SparseSum]:
        """The last phase of several teams: each gathers all blocks on its ranks (Bruck); returns the sum."""
        layout, mail = self._layout, self._mail
        block = self.ledger.round(block, layout.teams, self._team)
        team = [layout.rank(self._team, position) for position in range(layout.team_size)]
        message = mail.write(block, layout.column(self._position))
        messages = yield from bruck_all_gather(message, team, self._position)
        blocks = [mail.read(words, layout.column(position)) for position, words in enumerate(messages)]
        pairs = zip(*[(block.indices, block.values) for block in blocks], strict=True)
        return mail.sum_of(SparseVector(*map(np.concatenate, pairs)), layout.num_selected)

    def gather_among_all(self, block: SparseVector) -> Synchronization[SparseSum]:
        """The last phase of a single team: gathers all blocks on all ranks (allgather); returns the sum."""
        mine = self.ledger.round(block)
        sent = self._accumulator, mine.indices, mine.values, self._info, self._wire
        sum_ = yield from exchange_selections(*sent)
        sum_.counts = np.full_like(sum_.counts, self._layout.num_selected)
        return sum_
