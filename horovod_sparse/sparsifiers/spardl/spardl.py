"""SparDL: sparse reduce-scatter in teams, a sparse sum between teams, an all-gather."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from horovod_sparse.arrays import Accumulator
from horovod_sparse.checks import check_count, check_number
from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.sparsifiers.base import BucketInfo, SparseSum, Sparsifier, Traffic
from horovod_sparse.sparsifiers.rounds.sparse_vectors import discards_meet
from horovod_sparse.sparsifiers.spardl.layout import Layout, spardl_traffic
from horovod_sparse.sparsifiers.spardl.phases import RESIDUAL_MODES, Phases
from horovod_sparse.sparsifiers.spardl.teams import (
    SparDLState,
    Trials,
    adjust,
    candidates_of,
    fresh_state,
    is_power_of_two,
    num_between_teams,
    teams_by_cost,
)

_BETWEEN = ("auto", "recursive", "bruck")
_GATHER = ("auto", "allgather", "bruck")


@dataclass(frozen=True, kw_only=True)
class SparDL(Sparsifier):
    """Blocks are summed up along a short path, and cut to their largest elements at every stop.

    P ranks in d teams of Q = P / d; the bucket in Q blocks. Per step:

    1. Spar-Reduce-Scatter in every team: ``ceil(log2 Q)`` exchanges, one message each. A rank ends with
       its team's sum of one block, L = k / Q elements of it.
    2. Between the teams (d > 1), the sum of that block: R-SAG, ``log2 d`` exchanges of L elements, or
       B-SAG, ``ceil(log2 d)`` exchanges in which every rank gives h elements, L / d <= h <= L.
    3. All blocks for all ranks.

    Density is global: k elements come back (fewer where B-SAG's union falls short). Every rank receives
    ``2 k (P - 1) / P`` elements with one team, whatever P is; top-k needs ``k (P - 1)``.

    Args:
        density: k / n of the union, in (0, 1].
        teams: d, a divisor of P; or "auto": the cheapest by the cost model, from the two network arguments,
            checked by timing the candidates.
        residuals: "global" (nothing is lost), "partial" or "local" (as other methods do; for comparison).
        between: the sum between teams: "recursive" (R-SAG, d a power of two), "bruck" (B-SAG, any d), or
            "auto": the first where it can be.
        gather: the last phase: "bruck" (within every team), "allgather" (Horovod's, among all ranks, one
            round for it), or "auto": allgather for one team, where both cost the same by the model.
        latency_seconds: of one round on the network, for teams="auto".
        seconds_per_byte: of the network, for teams="auto". The defaults are 1 Gbit/s Ethernet.
        trial_steps: for teams="auto" in PyTorch: how many steps the candidates are timed for, each, after
            warm-up, before all ranks settle on the fastest; 0 trusts the model. A graph of TensorFlow
            has its rounds fixed and always does.

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
    trial_steps: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teams != "auto":
            check_count("teams", self.teams, 'a number of teams that divides the number of ranks, or "auto"')
        for argument, known in (("residuals", RESIDUAL_MODES), ("between", _BETWEEN), ("gather", _GATHER)):
            if getattr(self, argument) not in known:
                raise UnknownNameError(f"{argument} of spardl", str(getattr(self, argument)), known)
        for argument in ("latency_seconds", "seconds_per_byte"):
            value = getattr(self, argument)
            check_number(argument, value, "a time in seconds", low=0.0, high=1e9, include_low=True)
        check_count("trial_steps", self.trial_steps, "0, or a number of steps from 2 on", low=0)
        if self.trial_steps == 1:
            raise ArgumentError(
                "trial_steps", 1, "0, or a number of steps from 2 on: the first does not count"
            )

    def resolved(self, info: BucketInfo, *, timed: bool = False) -> SparDL:
        """With a number of teams that divides P, and a way between them that exists for it.

        With `timed` it is left open for teams="auto" where there is a choice.
        """
        if self.teams != "auto":
            return self._checked(info.size)
        if timed and self._trials(info) is not None:
            return self
        return dataclasses.replace(self, teams=self._by_cost(info)[0][0], trial_steps=0)._checked(info.size)

    def _by_cost(self, info: BucketInfo) -> list[tuple[int, float]]:
        """Numbers of teams by the model, for the density after warm-up."""
        k = min(info.num_elements, max(1, round(self.density * info.num_elements)))
        num_bytes = self.wire.message_bytes(k, info.num_elements, info.value_dtype)
        return teams_by_cost(info.size, num_bytes, self.latency_seconds, self.seconds_per_byte, self.between)

    def _trials(self, info: BucketInfo) -> Trials | None:
        """The candidates to time; None where nothing is to be chosen."""
        if self.teams != "auto" or self.trial_steps == 0 or info.size == 1:
            return None
        candidates = candidates_of(self._by_cost(info), self.gather)
        return Trials(candidates, self.trial_steps) if len(candidates) > 1 else None

    def _plan(self, info: BucketInfo, state: SparDLState, trials: Trials | None) -> SparDL:
        """The description of this step."""
        if trials is None:
            return self.resolved(info)
        choice = trials.current(state)
        return dataclasses.replace(self, teams=choice.teams, gather=choice.gather)._checked(info.size)

    def _checked(self, size: int) -> SparDL:
        """With all choices made for a number of ranks."""
        teams = self.teams
        divisors = [number for number in range(1, size + 1) if size % number == 0]
        if not isinstance(teams, (int, np.integer)):
            raise ArgumentError("teams", teams, "a number: a bucket decides it (`Sparsifier.resolved`)")
        if size % teams:
            raise ArgumentError("teams", teams, f'a divisor of {size} ranks ({divisors}), or "auto"')
        if self.between == "recursive" and not is_power_of_two(teams):
            raise ArgumentError(
                "between", self.between, f'"bruck" or "auto": {teams} teams are not a power of two'
            )
        recursive = self.between == "recursive" or (self.between == "auto" and is_power_of_two(teams))
        gather = self.gather
        if gather == "auto":
            gather = "allgather" if teams == 1 else "bruck"
        return dataclasses.replace(
            self, teams=int(teams), between="recursive" if recursive else "bruck", gather=gather
        )

    def init(self, info: BucketInfo) -> SparDLState:
        return fresh_state(_number(self.resolved(info).teams))

    def layout(self, info: BucketInfo, num_selected: int, step: int) -> Layout:
        """Teams, blocks and quotas of a step."""
        return Layout(info.size, _number(self.teams), info.num_elements, num_selected, step)

    def synchronize(
        self, accumulator: Accumulator, state: SparDLState, info: BucketInfo
    ) -> Synchronization[SparseSum]:
        started, trials = time.perf_counter(), self._trials(info)
        if trials is not None and self.density_at(state.step) != self.density:
            trials = None  # a warm-up's messages are longer: what is timed there says nothing
        plan, k = self._plan(info, state, trials), self.num_selected(info, state)
        layout = plan.layout(info, k, state.step)
        phases = Phases(accumulator, info, layout, self.wire, notes_travel=plan.gather == "bruck")
        facts = {"teams": float(layout.teams)}
        if trials is not None:
            facts["on_trial"] = float(not state.teams)

        block = yield from phases.scatter_reduce()
        quota = layout.quota(layout.place(info.rank)[1])
        if layout.teams > 1 and plan.between == "recursive":
            block = yield from phases.recursive_doubling(block)
        elif layout.teams > 1:
            start, stop = layout.window(layout.place(info.rank)[1])
            keeps_all = quota == stop - start  # a union cannot be longer than the block: no need to send less
            num_sent = quota if keeps_all else num_between_teams(state, quota, layout.teams)
            block, num_after = yield from phases.bruck(block, num_sent)
            facts |= {"num_between_teams": float(num_sent), "num_after_teams": float(num_after)}
            if not keeps_all:
                adjust(state, num_after, quota, layout.teams)
        if plan.gather == "bruck":
            sum_ = yield from phases.gather_within_team(block)
        else:
            sum_ = yield from phases.gather_among_all(block)

        phases.ledger.settle(sum_.indices, self.residuals, in_place=discards_meet(state.step))
        if trials is not None:
            yield from trials.timed(state, started)
        state.step += 1
        sum_.facts.update(facts)
        return sum_

    def rounds(self, size: int) -> tuple[type[Request], ...]:
        """Exchanges within teams, between them, and the last phase."""
        self._checked(size)
        return super().rounds(size)

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """Exact but for B-SAG, where it is between that of h = L / d and of h = L."""
        plan = self.resolved(info)
        layout = plan.layout(info, int(counts[info.rank]), step)
        return spardl_traffic(info, layout, self.wire, plan.between == "recursive", plan.gather == "bruck")


def _number(teams: int | str) -> int:
    """The number of teams of a description that has been resolved."""
    return int(teams)
