"""teams="auto": the number of teams that the model prefers, checked by timing the candidates' first steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from horovod_sparse.collectives import AllGather, Synchronization
from horovod_sparse.sparsifiers.spardl_adjust import SparDLState, restart

__all__ = ["Choice", "Trials", "candidates_of"]

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

    Args:
        by_cost: (d, predicted seconds), the least first.
        gather: as the user asks for it. With "auto" both ways are tried for one team, where the model
            counts the same for them: Bruck's rounds go between pairs, the allgather through Horovod.

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


class Trials:
    """Which candidate a step uses, and what the first steps say about them.

    Every candidate has some steps in a row. The first of them does not count (Horovod learns the new
    names and lengths), of the others the fastest does. After the last one the ranks tell each other
    their times, once, and take the candidate whose slowest rank is fastest.

    Args:
        candidates: the same on all ranks; the model's own choice first.
        num_steps: for each, 2 or more.
    """

    def __init__(self, candidates: Sequence[Choice], num_steps: int) -> None:
        self._candidates, self._num_steps = list(candidates), num_steps

    def current(self, state: SparDLState) -> Choice:
        """What this step uses. Algorithm 2 begins anew when it changes."""
        if state.teams:
            return Choice(state.teams, state.gather)
        number, steps_before = divmod(len(state.timed), self._num_steps)
        choice = self._candidates[number]
        if steps_before == 0:
            restart(state, choice.teams)
        return choice

    def timed(self, state: SparDLState, started: float) -> Synchronization[None]:
        """Notes how long a step took; after the last one all ranks agree.

        Args:
            state: changed in place.
            started: when the step began, in seconds of `time.perf_counter`.
        """
        if state.teams:
            return
        state.timed.append(time.perf_counter() - started)
        if len(state.timed) < len(self._candidates) * self._num_steps:
            return
        fastest = np.array(state.timed).reshape(len(self._candidates), -1)[:, 1:].min(axis=1)
        gathered = np.ascontiguousarray((yield AllGather(fastest.view(np.int32)))).view(np.float64)
        slowest_rank = gathered.reshape(-1, len(self._candidates)).max(axis=0)
        best = int(np.argmin(slowest_rank))
        if slowest_rank[best] > _CLEARLY * slowest_rank[0]:
            best = 0
        choice = self._candidates[best]
        state.teams, state.gather, state.timed = choice.teams, choice.gather, []
        restart(state, choice.teams)
