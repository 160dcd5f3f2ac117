"""SparDL's teams: how many, by the paper's formulas and by timing, and what they send to each other."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from horovod_sparse.checks import LARGEST, out_of_range
from horovod_sparse.collectives import LOCAL, AllGather, Synchronization
from horovod_sparse.sparsifiers.base import SparsifierState
from horovod_sparse.sparsifiers.rounds.pairs import ceil_log2


def is_power_of_two(number: int) -> bool:
    """Whether a number from 1 is 2**m."""
    return number & (number - 1) == 0


def spardl_cost(size: int, teams: int, between: str) -> tuple[int, float, float]:
    """Rounds, and elements received as a share of k: Eqs. (4), (7) and (10) of the paper.

    Example:
        >>> spardl_cost(14, 1, "recursive")
        (8, 1.857..., 1.857...)
        >>> spardl_cost(14, 7, "bruck")
        (5, 1.0, 4.0)
    """
    num_blocks = size // teams
    rounds = 2 * ceil_log2(num_blocks) + ceil_log2(teams)
    within = (size - teams) / size
    if between == "recursive":
        both = 2 * within + teams / size * math.log2(teams)
        return rounds, both, both
    least = within + (teams - 1) / size + within / teams
    return rounds, least, 2 * within + teams * (teams - 1) / size


def teams_by_cost(
    size: int, bytes_of_union: float, latency_seconds: float, seconds_per_byte: float, between: str = "auto"
) -> list[tuple[int, float]]:
    """Every divisor d of P with its predicted time, the least first, the smaller of equals.

    Example:
        >>> [teams_by_cost(16, 1e6, latency, 8e-9)[0][0] for latency in (1e-6, 1.0)]
        [2, 16]
    """

    def seconds(teams: int) -> float:
        way = between
        if way == "auto":
            way = "recursive" if is_power_of_two(teams) else "bruck"
        rounds, least, most = spardl_cost(size, teams, way)
        return rounds * latency_seconds + bytes_of_union * (least + most) / 2 * seconds_per_byte

    divisors = [teams for teams in range(1, size + 1) if size % teams == 0]
    if between == "recursive":
        divisors = [teams for teams in divisors if is_power_of_two(teams)]
    return sorted(((teams, seconds(teams)) for teams in divisors), key=lambda pair: pair[1])


#: the first stride, as a share of the range that h may have
_FIRST_STRIDE = 0.01


@dataclass
class SparDLState(SparsifierState):
    """State of SparDL.

    Attributes:
        step: synchronizations done.
        share: h / L: of a block's quota, what a rank sends to the other teams (B-SAG). In [1 / d, 1].
        stride: what is added to it per step; its sign is the direction.
        confirmed: whether the direction was right the last time, too.
        teams: d that timing has settled on, for teams="auto"; 0 before, and where nothing is timed.
        gather: the last phase that it has settled on; empty before.
        timed: seconds of the steps that were timed so far on this rank.
    """

    step: int = 0
    share: float = 1.0
    stride: float = 0.0
    confirmed: bool = False
    teams: int = 0
    gather: str = ""
    timed: list[float] = field(default_factory=list, metadata=LOCAL)

    def flaw(self, _fresh: SparDLState) -> str:
        """Of a loaded one: see `out_of_range`."""
        return out_of_range(self, share=(0, 1), stride=(-LARGEST, LARGEST), teams=(0, 2.0**31))


def restart(state: SparDLState, teams: int) -> None:
    """Algorithm 2 from its beginning, for another number of teams; all else stays."""
    fresh = fresh_state(teams)
    state.share, state.stride, state.confirmed = fresh.share, fresh.stride, fresh.confirmed


def fresh_state(teams: int) -> SparDLState:
    """As the paper begins: h = k / P, the stride 0.01 k (d - 1) / P."""
    return SparDLState(share=1.0 / teams, stride=_FIRST_STRIDE * (teams - 1) / teams)


def num_between_teams(state: SparDLState, quota: int, teams: int) -> int:
    """h: elements of a block that a rank sends to the other teams, from L / d to L."""
    return min(quota, max(-(-quota // teams), round(state.share * quota)))


def adjust(state: SparDLState, num_after: int, quota: int, teams: int) -> None:
    """One step of Algorithm 2: more if the teams' union was short of L, less if it was above.

    Twice in the right direction doubles the stride, the wrong direction turns and halves it. Shares
    instead of counts (h / L, stride / L) mean the same, and hold when the density changes.

    Source: SparDL, Algorithm 2, as printed (its text has the signs the other way round). Departures:
    the stride never falls below one element, or it could not recover (in the public program it is
    a whole number, and stays 0 for ever); it never exceeds the range, and h stays within it.

    Example:
        >>> state = fresh_state(teams=4)
        >>> for _ in range(3): adjust(state, num_after=50, quota=100, teams=4)
        >>> round(state.share, 4), round(state.stride, 4)
        (0.2875, 0.015)
    """
    lowest, room = 1.0 / teams, (teams - 1) / teams
    if teams == 1 or quota == 0:
        return
    if (num_after > quota) != (state.stride > 0.0):
        if state.confirmed:
            state.stride *= 2.0
        state.confirmed = not state.confirmed
    else:
        state.stride *= -0.5
        state.confirmed = False
    least = min(1.0 / quota, _FIRST_STRIDE * room)
    sign = 1.0 if num_after <= quota else -1.0
    state.stride = sign * min(room, max(least, abs(state.stride)))
    state.share = min(1.0, max(lowest, state.share + state.stride))


#: candidates, at most; and how many times the cheapest one's predicted time they may take
_MOST, _WITHIN = 4, 3.0
#: the model's own choice stays unless another takes less than this share of its time
_CLEARLY = 0.95


@dataclass(frozen=True)
class Choice:
    """What is timed.

    Attributes:
        teams: d.
        gather: the last phase: "bruck" or "allgather".
    """

    teams: int
    gather: str


def candidates_of(by_cost: Sequence[tuple[int, float]], gather: str) -> list[Choice]:
    """What is worth a trial, the model's own choice first.

    Example:
        >>> [(one.teams, one.gather) for one in candidates_of([(2, 1.0), (1, 1.1), (4, 9.0)], "auto")]
        [(2, 'bruck'), (1, 'allgather'), (1, 'bruck')]
    """
    found = []
    for teams, seconds in by_cost:
        if seconds > _WITHIN * by_cost[0][1]:
            continue
        if gather != "auto":
            found.append(Choice(teams, gather))
        elif teams == 1:
            found += [Choice(1, "allgather"), Choice(1, "bruck")]
        else:
            found.append(Choice(teams, "bruck"))
    return found[:_MOST]


@dataclass(frozen=True)
class Trials:
    """Which candidate a step uses, and what the first steps say about them.

    Every candidate has some steps in a row. The first of them does not count (Horovod learns the new
    names and lengths), of the others the fastest does. After the last one the ranks tell each other
    their times, once, and take the candidate whose slowest rank is fastest.
    """

    candidates: Sequence[Choice]
    num_steps: int

    def current(self, state: SparDLState) -> Choice:
        """What this step uses. Algorithm 2 begins anew when it changes."""
        if state.teams:
            return Choice(state.teams, state.gather)
        number, steps_before = divmod(len(state.timed), self.num_steps)
        choice = self.candidates[number]
        if steps_before == 0:
            restart(state, choice.teams)
        return choice

    def timed(self, state: SparDLState, started: float) -> Synchronization[None]:
        """Notes how long a step took; after the last one all ranks agree."""
        if state.teams:
            return
        state.timed.append(time.perf_counter() - started)
        if len(state.timed) < len(self.candidates) * self.num_steps:
            return
        fastest = np.array(state.timed).reshape(len(self.candidates), -1)[:, 1:].min(axis=1)
        gathered = np.ascontiguousarray((yield AllGather(fastest.view(np.int32)))).view(np.float64)
        slowest_rank = gathered.reshape(-1, len(self.candidates)).max(axis=0)
        best = int(np.argmin(slowest_rank))
        if slowest_rank[best] > _CLEARLY * slowest_rank[0]:
            best = 0
        choice = self.candidates[best]
        state.teams, state.gather, state.timed = choice.teams, choice.gather, []
        restart(state, choice.teams)
