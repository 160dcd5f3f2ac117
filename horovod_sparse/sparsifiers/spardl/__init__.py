"""SparDL: sparse reduce-scatter in teams, a sparse sum between teams, an all-gather."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from horovod_sparse.arrays import Accumulator
from horovod_sparse.checks import check_count, check_number
from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.sparsifiers.base import BucketInfo, SparseSum, Sparsifier, Traffic
from horovod_sparse.sparsifiers.rounds.sparse_vectors import keeps_discards
from horovod_sparse.sparsifiers.spardl.phases import RESIDUAL_MODES, Phases
from horovod_sparse.sparsifiers.spardl.teams import SparDLState, TeamLayout, is_power_of_two, teams_by_cost

_BETWEEN = ("auto", "recursive", "bruck")
_GATHER = ("auto", "allgather", "bruck")


@dataclass(frozen=True, kw_only=True)
class SparDL(Sparsifier):
    """Ranks sum up blocks in about log2 P rounds, and keep only a block's largest elements after each.

    P ranks in d teams of Q = P / d; the bucket in Q blocks. Per step:

    1. Spar-Reduce-Scatter in every team: ``ceil(log2 Q)`` exchanges, one message each. A rank ends with
       its team's sum of one block, L = k / Q elements of it.
    2. Between the teams (d > 1), the sum of that block: R-SAG, ``log2 d`` exchanges of L elements, or
       B-SAG, ``ceil(log2 d)`` exchanges in which every rank gives h elements, L / d <= h <= L.
    3. All blocks for all ranks.

    Density is global: k elements come back (fewer where B-SAG's union falls short). Every rank receives
    ``2 k (P - 1) / P`` elements with one team, whatever P is; top-k needs ``k (P - 1)``.

    Args:
        teams: d, a divisor of P; or "auto": the cheapest by the cost model, from the two network arguments.
        residuals: "global" (nothing is lost), "partial" or "local" (as other methods do; for comparison).
        between: the sum between teams: "recursive" (R-SAG, d a power of two), "bruck" (B-SAG, any d), or
            "auto": the first where it can be.
        gather: the last phase: "bruck" (within every team), "allgather" (Horovod's, among all ranks, one
            round for it), or "auto": allgather for one team, where both cost the same by the model.
        latency_seconds: of one round on the network, for teams="auto".
        seconds_per_byte: of the network, for teams="auto". The defaults are 1 Gbit/s Ethernet.

    Source: Zhao et al., SparDL (papers' Algorithms 1 and 2). Departures: docs/algorithms.md.

    Example:
        >>> SparDL(density=0.01, teams=2).describe()
        'spardl:density=0.01,teams=2'
        >>> len(SparDL(teams=2).rounds(6))
        5
    """

    name: ClassVar[str] = "spardl"
    density_scope: ClassVar[Literal["per rank", "global"]] = "global"

    teams: int | str = 1
    residuals: str = "global"
    between: str = "auto"
    gather: str = "auto"
    latency_seconds: float = 50e-6
    seconds_per_byte: float = 8e-9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teams != "auto":
            check_count("teams", self.teams, 'a number of teams that divides the number of ranks, or "auto"')
        for argument, known in (("residuals", RESIDUAL_MODES), ("between", _BETWEEN), ("gather", _GATHER)):
            if getattr(self, argument) not in known:
                raise UnknownNameError(f"{argument} of spardl", str(getattr(self, argument)), known)
        for argument in ("latency_seconds", "seconds_per_byte"):
            value = getattr(self, argument)
            check_number(argument, value, "a time in seconds", "[0, 1e9]")

    def resolved(self, info: BucketInfo) -> SparDL:
        """Returns a copy that has decided the number of teams, which divides P, and the path between them."""
        size, teams, between, gather = info.size, self.teams, self.between, self.gather
        if teams == "auto":
            k = replace(self, schedule=None).num_selected(info, 0)  # that after a warm-up
            num_bytes = self.wire.message_bytes(k, info.num_elements, info.value_dtype)
            teams = teams_by_cost(size, num_bytes, self.latency_seconds, self.seconds_per_byte, between)[0][0]
        teams = int(teams)
        if size % teams:
            divisors = [number for number in range(1, size + 1) if size % number == 0]
            raise ArgumentError("teams", teams, f'a divisor of {size} ranks ({divisors}), or "auto"')
        if between == "recursive" and not is_power_of_two(teams):
            allowed = f'"bruck" or "auto": {teams} teams are not a power of two'
            raise ArgumentError("between", between, allowed)
        if between == "auto":
            between = "recursive" if is_power_of_two(teams) else "bruck"
        if gather == "auto":
            gather = "allgather" if teams == 1 else "bruck"
        return replace(self, teams=teams, between=between, gather=gather)

    def init(self, info: BucketInfo) -> SparDLState:
        return SparDLState.first(int(self.resolved(info).teams))

    def layout(self, info: BucketInfo, num_selected: int, step: int) -> TeamLayout:
        """Returns the teams, blocks and quotas of a step; `resolved` has decided the number of teams."""
        return TeamLayout(info.size, int(self.teams), info.num_elements, num_selected, step)

    def synchronize(
        self, accumulator: Accumulator, state: SparDLState, info: BucketInfo
    ) -> Synchronization[tuple[SparseSum, SparDLState]]:
        plan = self.resolved(info)
        layout = plan.layout(info, self.num_selected(info, state.step), state.step)
        phases = Phases(accumulator, info, layout, self.wire, notes_travel=plan.gather == "bruck")
        facts = {"teams": float(layout.teams)}

        block = yield from phases.scatter_reduce()
        quota = layout.quota(layout.team_and_position(info.rank)[1])
        after = state
        if layout.teams > 1 and plan.between == "recursive":
            block = yield from phases.recursive_doubling(block)
        elif layout.teams > 1:
            start, stop = layout.window(layout.team_and_position(info.rank)[1])
            keeps_all = quota == stop - start  # a union cannot be longer than the block: no need to send less
            num_sent = quota if keeps_all else state.num_sent(quota, layout.teams)
            block, num_after = yield from phases.bruck(block, num_sent)
            facts |= {"num_between_teams": float(num_sent), "num_after_teams": float(num_after)}
            if not keeps_all:
                after = state.with_adjusted_share(num_after, quota, layout.teams)
        if plan.gather == "bruck":
            sum_ = yield from phases.gather_within_team(block)
        else:
            sum_ = yield from phases.gather_among_all(block)

        phases.ledger.settle(sum_.indices, self.residuals, in_place=keeps_discards(state.step))
        sum_.facts.update(facts)
        return sum_, after

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """Declares exact bytes, but for B-SAG a range: from h = L / d elements of a block to h = L."""
        plan = self.resolved(info)
        layout = plan.layout(info, int(counts[info.rank]), step)
        return layout.traffic(info, self.wire, plan.between == "recursive", plan.gather == "bruck")
