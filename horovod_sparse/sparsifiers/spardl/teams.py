"""SparDL's teams: how many, by the paper's formulas, and how much they send to each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from horovod_sparse.checks import LARGEST, out_of_range
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


@dataclass(frozen=True)
class SparDLState(SparsifierState):
    """State of SparDL.

    Attributes:
        step: synchronizations done.
        share: h / L: of a block's quota, what a rank sends to the other teams (B-SAG). In [1 / d, 1].
        stride: what is added to it per step; its sign is the direction.
        confirmed: whether the direction was right the last time, too.
    """

    FORMER: ClassVar[frozenset[str]] = SparsifierState.FORMER | {"teams", "gather", "timed"}

    share: float = 1.0
    stride: float = 0.0
    confirmed: bool = False

    def flaw(self, _fresh: SparDLState) -> str:
        """Of a loaded one: see `out_of_range`."""
        return out_of_range(self, share=(0, 1), stride=(-LARGEST, LARGEST))


def fresh_state(teams: int) -> SparDLState:
    """As the paper begins: h = k / P, the stride 0.01 k (d - 1) / P."""
    return SparDLState(share=1.0 / teams, stride=_FIRST_STRIDE * (teams - 1) / teams)


def num_between_teams(state: SparDLState, quota: int, teams: int) -> int:
    """h: elements of a block that a rank sends to the other teams, from L / d to L."""
    return min(quota, max(-(-quota // teams), round(state.share * quota)))


def adjusted(state: SparDLState, num_after: int, quota: int, teams: int) -> SparDLState:
    """One step of Algorithm 2: more if the teams' union was short of L, less if it was above.

    Twice in the right direction doubles the stride, the wrong direction turns and halves it. Shares
    instead of counts (h / L, stride / L) mean the same, and hold when the density changes.

    Source: SparDL, Algorithm 2, as printed (its text has the signs the other way round). Departures:
    the stride never falls below one element, or it could not recover (in the public program it is
    a whole number, and stays 0 for ever); it never exceeds the range, and h stays within it.

    Example:
        >>> state = fresh_state(teams=4)
        >>> for _ in range(3): state = adjusted(state, num_after=50, quota=100, teams=4)
        >>> round(state.share, 4), round(state.stride, 4)
        (0.2875, 0.015)
    """
    lowest, room = 1.0 / teams, (teams - 1) / teams
    if teams == 1 or quota == 0:
        return state
    stride, confirmed = state.stride, False
    if (num_after > quota) != (stride > 0.0):
        stride, confirmed = stride * (2.0 if state.confirmed else 1.0), not state.confirmed
    else:
        stride *= -0.5
    least = min(1.0 / quota, _FIRST_STRIDE * room)
    stride = math.copysign(min(room, max(least, abs(stride))), quota - num_after)
    share = min(1.0, max(lowest, state.share + stride))
    return replace(state, share=share, stride=stride, confirmed=confirmed)
