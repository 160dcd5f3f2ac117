"""SparDL: sparse reduce-scatter in teams, a sparse sum between teams, an all-gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from horovod_sparse.arrays import Accumulator
from horovod_sparse.checks import check_count
from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.sparsifiers.base import BucketInfo, SparseSum, Sparsifier, Traffic
from horovod_sparse.sparsifiers.rounds.sparse_vectors import keeps_discards
from horovod_sparse.sparsifiers.spardl.phases import RESIDUAL_MODES, Phases
from horovod_sparse.sparsifiers.spardl.teams import SparDLState, TeamLayout

_BETWEEN = ("auto", "recursive", "bruck")


@dataclass(frozen=True, kw_only=True)
class SparDL(Sparsifier):
    """Ranks sum up blocks in about log2 P rounds, and keep only a block's largest elements after each.

    P ranks in d teams of Q = P / d; the bucket in Q blocks. Per step:

    1. Spar-Reduce-Scatter in every team: ``ceil(log2 Q)`` exchanges, one message each. A rank ends with
       its team's sum of one block, L = k / Q elements of it.
    2. Between the teams (d > 1), the sum of that block: R-SAG, ``log2 d`` exchanges of L elements, or
       B-SAG, ``ceil(log2 d)`` exchanges in which every rank gives h elements, L / d <= h <= L.
    3. All blocks for all ranks, by Horovod's allgather with one team, else by Bruck's within every team.

    Density is global: k elements come back (fewer where B-SAG's union falls short). Every rank receives
    ``2 k (P - 1) / P`` elements with one team, whatever P is; top-k needs ``k (P - 1)``.

    Args:
        teams: d, a divisor of P.
        residuals: "global" (nothing is lost), "partial" or "local" (as other methods do; for comparison).
        between: the sum between teams: "recursive" (R-SAG, d a power of two), "bruck" (B-SAG, any d), or
            "auto": the first where it can be.

    Source: Zhao et al., SparDL (papers' Algorithms 1 and 2). Departures: docs/algorithms.md.

    Example:
        >>> SparDL(density=0.01, teams=2).describe()
        'spardl:density=0.01,teams=2'
        >>> len(SparDL(teams=2).rounds(6))
        5
    """

    name: ClassVar[str] = "spardl"
    density_scope: ClassVar[Literal["per rank", "global"]] = "global"

    teams: int = 1
    residuals: str = "global"
    between: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("teams", self.teams, "a number of teams that divides the number of ranks")
        for argument, known in (("residuals", RESIDUAL_MODES), ("between", _BETWEEN)):
            if getattr(self, argument) not in known:
                raise UnknownNameError(f"{argument} of spardl", str(getattr(self, argument)), known)
        if self.between == "recursive" and not self._uses_recursive_doubling:
            allowed = f'"bruck" or "auto": {self.teams} teams are not a power of two'
            raise ArgumentError("between", self.between, allowed)

    @property
    def _uses_recursive_doubling(self) -> bool:
        """True if teams are summed by R-SAG (recursive doubling), which takes a power of two of teams."""
        return self.between != "bruck" and self.teams & (self.teams - 1) == 0

    def init(self, info: BucketInfo) -> SparDLState:
        self.layout(info, 1, 0)  # refuses a number of teams
        return SparDLState.first(self.teams)

    def layout(self, info: BucketInfo, num_selected: int, step: int) -> TeamLayout:
        """Returns a step's `TeamLayout`; raises if the number of ranks is no multiple of `teams`."""
        if info.size % self.teams:
            divisors = [number for number in range(1, info.size + 1) if info.size % number == 0]
            raise ArgumentError("teams", self.teams, f"a divisor of {info.size} ranks ({divisors})")
        return TeamLayout(info.size, self.teams, info.num_elements, num_selected, step)

    def synchronize(
        self, accumulator: Accumulator, state: SparDLState, info: BucketInfo
    ) -> Synchronization[tuple[SparseSum, SparDLState]]:
        layout = self.layout(info, self.num_selected(info, state.step), state.step)
        phases = Phases(accumulator, info, layout, self.wire)
        facts = {"teams": float(layout.teams)}

        block = yield from phases.scatter_reduce()
        quota = layout.quota(layout.team_and_position(info.rank)[1])
        after = state
        if layout.teams > 1 and self._uses_recursive_doubling:
            block = yield from phases.recursive_doubling(block)
        elif layout.teams > 1:
            start, stop = layout.window(layout.team_and_position(info.rank)[1])
            keeps_all = quota == stop - start  # a union cannot be longer than the block: no need to send less
            num_sent = quota if keeps_all else state.num_sent(quota, layout.teams)
            block, num_after = yield from phases.bruck(block, num_sent)
            facts |= {"num_between_teams": float(num_sent), "num_after_teams": float(num_after)}
            if not keeps_all:
                after = state.with_adjusted_share(num_after, quota, layout.teams)
        gather = phases.gather_among_all if layout.teams == 1 else phases.gather_within_team
        sum_ = yield from gather(block)

        phases.ledger.settle(sum_.indices, self.residuals, in_place=keeps_discards(state.step))
        sum_.facts.update(facts)
        return sum_, after

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """Declares each round's bytes: exactly, or with B-SAG from h = L / d elements of a block to L."""
        layout = self.layout(info, int(counts[info.rank]), step)
        return layout.traffic(info, self.wire, self._uses_recursive_doubling)
