"""B-SAG's own sparsity between teams, steered by Algorithm 2 of the SparDL paper."""

from __future__ import annotations

from dataclasses import dataclass, field

from horovod_sparse.collectives import LOCAL
from horovod_sparse.sparsifiers.base import SparsifierState

__all__ = ["SparDLState", "adjust", "fresh_state", "num_between_teams", "restart"]

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

    Args:
        state: changed in place.
        num_after: N, elements of the union before it was cut.
        quota: L.
        teams: d.

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
