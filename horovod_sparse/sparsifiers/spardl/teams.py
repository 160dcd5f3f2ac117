"""SparDL's teams: their layout, their traffic, and the state between steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from horovod_sparse.collectives import AllGather, Exchange, rank_part
from horovod_sparse.sparsifiers.base import BucketInfo, SparsifierState, Traffic
from horovod_sparse.sparsifiers.rounds.pairs import bruck_counts, ceil_log2, mail_words
from horovod_sparse.sparsifiers.rounds.sparse_vectors import Window
from horovod_sparse.wire import WireFormat


@dataclass(frozen=True)
class TeamLayout:
    """Divides P ranks into d teams of Q = P / d neighbours, and the bucket into Q blocks."""

    size: int
    teams: int
    num_elements: int
    num_selected: int
    step: int = 0

    @property
    def team_size(self) -> int:
        """Q, the number of ranks of a team and of blocks of the bucket."""
        return self.size // self.teams

    @property
    def num_stages(self) -> int:
        """The number of rounds of Spar-Reduce-Scatter: ceil(log2 Q)."""
        return ceil_log2(self.team_size)

    def team_and_position(self, rank: int) -> tuple[int, int]:
        return divmod(rank, self.team_size)

    def rank(self, team: int, position: int) -> int:
        """Returns the rank at a position of a team; positions beyond the team's end begin again at 0."""
        return team * self.team_size + position % self.team_size

    def column(self, position: int) -> list[int]:
        """Returns the ranks at the same position in all teams, which sum up the same block."""
        return [self.rank(team, position) for team in range(self.teams)]

    def window(self, block: int) -> Window:
        return rank_part(self.num_elements, block, self.team_size)

    def quota(self, block: int) -> int:
        """Returns how many elements of a block are kept: about k / Q, and k over all blocks.

        ``floor((stop k + s) / n) - floor((start k + s) / n)``; the shift s moves by a block's length every
        step, and by one more where it would come back too early: in any n steps a block of m elements gets
        ``m k``, and never more than m in one.
        """
        n, k = self.num_elements, self.num_selected
        start, stop = self.window(block)
        length = -(-n // self.team_size)
        num_offsets = math.gcd(n, length)
        shift = (self.step * length + self.step // (n // num_offsets) % num_offsets) % n
        return (stop * k + shift) // n - (start * k + shift) // n

    def bag(self, position: int, stage: int) -> list[int]:
        """Returns the blocks that the rank at a position sends to the rank 2**stage positions further."""
        first = 1 << stage
        stop = min(2 * first, self.team_size)
        return [(position + offset) % self.team_size for offset in range(first, stop)]

    def traffic(self, info: BucketInfo, wire: WireFormat, recursive: bool) -> tuple[Traffic, ...]:
        """Declares a step's collectives and this rank's bytes; teams are summed by R-SAG if `recursive`."""
        _, position = self.team_and_position(info.rank)
        d, quota = self.teams, self.quota(position)
        # B-SAG may leave as few elements of a block as one team gives
        exact = recursive

        def bounds(words_of: Callable[[int], int], count: int) -> tuple[int, int]:
            return words_of(count if exact else -(-count // d)), words_of(count)

        def traffic_of(kind: type, ranges: list[tuple[int, int]]) -> Traffic:
            low, high = 4 * sum(low for low, _ in ranges), 4 * sum(high for _, high in ranges)
            return Traffic(kind, low, None if exact else high)

        rounds = []
        for stage in reversed(range(self.num_stages)):
            count = sum(self.quota(block) for block in self.bag(position, stage))
            rounds.append(Traffic(Exchange, 4 * mail_words(count, 0, info, wire)))
        if d == 1:
            return (*rounds, Traffic(AllGather, 4 * mail_words(quota, 0, info, wire)))
        if recursive:
            rounds += [
                Traffic(Exchange, 4 * mail_words(quota, 1 << stage, info, wire))
                for stage in range(d.bit_length() - 1)
            ]
        else:
            given = bounds(lambda count: 1 + mail_words(count, 1, info, wire), quota)
            rounds += [traffic_of(Exchange, [given] * num_sent) for num_sent in bruck_counts(d)]

        def block_words(count: int) -> int:
            return 1 + mail_words(count, d, info, wire)

        for num_sent in bruck_counts(self.team_size):
            blocks = [(position + offset) % self.team_size for offset in range(num_sent)]
            rounds.append(traffic_of(Exchange, [bounds(block_words, self.quota(block)) for block in blocks]))
        return tuple(rounds)


#: the first stride, as a share of the range that h may have
_FIRST_STRIDE = 0.01


@dataclass(frozen=True)
class SparDLState(SparsifierState):
    """State of SparDL: the share of a block that other teams get, and how it is changed."""

    #: h / L: of a block's quota, what a rank sends to the other teams (B-SAG). In [1 / d, 1].
    share: float = 1.0
    #: added to the share in each step; its sign is the direction
    stride: float = 0.0
    #: whether the direction was right the last time, too
    confirmed: bool = False

    @classmethod
    def first(cls, teams: int) -> SparDLState:
        """Returns the state before the first step: share 1 / d, stride 0.01 (d - 1) / d with d teams."""
        return cls(share=1.0 / teams, stride=_FIRST_STRIDE * (teams - 1) / teams)

    def num_sent(self, quota: int, teams: int) -> int:
        """Returns h, the number of a block's elements that other teams get: L / d to L (L: `quota`)."""
        return min(quota, max(-(-quota // teams), round(self.share * quota)))

    def with_adjusted_share(self, num_after: int, quota: int, teams: int) -> SparDLState:
        """Returns the next state (Algorithm 2): a larger share if the teams' union was below `quota`.

        A second change in the right direction doubles the stride; a change in the wrong direction reverses
        and halves it. Shares (h / L, stride / L) replace the paper's counts: they outlive changes of density.

        Source: SparDL, Algorithm 2, as printed (its text has the signs the other way round). Departures:
        the stride never falls below one element, or it could not recover (in the public program it is
        a whole number, and stays 0 for ever); it never exceeds the range, and h stays within it.

        Example:
            >>> state = SparDLState.first(teams=4)
            >>> for _ in range(3): state = state.with_adjusted_share(num_after=50, quota=100, teams=4)
            >>> round(state.share, 4), round(state.stride, 4)
            (0.2875, 0.015)
        """
        lowest, room = 1.0 / teams, (teams - 1) / teams
        if teams == 1 or quota == 0:
            return self
        stride, confirmed = self.stride, False
        if (num_after > quota) != (stride > 0.0):
            stride, confirmed = stride * (2.0 if self.confirmed else 1.0), not self.confirmed
        else:
            stride *= -0.5
        least = min(1.0 / quota, _FIRST_STRIDE * room)
        stride = math.copysign(min(room, max(least, abs(stride))), quota - num_after)
        share = min(1.0, max(lowest, self.share + stride))
        return replace(self, share=share, stride=stride, confirmed=confirmed)
