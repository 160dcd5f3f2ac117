"""Who has which place in SparDL: teams, blocks, quotas, bags, and what each rank sends for that."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from horovod_sparse.collectives import AllGather, Exchange, part
from horovod_sparse.sparsifiers.base import BucketInfo, Traffic
from horovod_sparse.sparsifiers.rounds.pairs import bruck_bags, ceil_log2, mail_words
from horovod_sparse.sparsifiers.rounds.sparse_vectors import Window
from horovod_sparse.wire import WireFormat


@dataclass(frozen=True)
class TeamLayout:
    """P ranks in d teams of Q = P / d; the bucket in Q blocks, in every team alike.

    Ranks T * Q ... T * Q + Q - 1 are team T, so that ranks of one host are of one team where that is
    possible.

    Example:
        >>> layout = TeamLayout(size=6, teams=1, num_elements=60, num_selected=12)
        >>> [layout.bag(1, stage) for stage in range(3)]
        [[2], [3, 4], [5, 0]]
        >>> layout.window(5), layout.quota(5)
        ((50, 60), 2)
    """

    size: int
    teams: int
    num_elements: int
    num_selected: int
    step: int = 0

    @property
    def team_size(self) -> int:
        """Q, ranks per team and blocks of the bucket."""
        return self.size // self.teams

    @property
    def num_stages(self) -> int:
        """Rounds of Spar-Reduce-Scatter: ceil(log2 Q)."""
        return ceil_log2(self.team_size)

    def team_and_position(self, rank: int) -> tuple[int, int]:
        """(team, position within it) of a rank."""
        return divmod(rank, self.team_size)

    def rank(self, team: int, position: int) -> int:
        """Who has a place; positions count around the circle."""
        return team * self.team_size + position % self.team_size

    def column(self, position: int) -> list[int]:
        """The ranks at one position of all teams: those who end with the same block."""
        return [self.rank(team, position) for team in range(self.teams)]

    def window(self, block: int) -> Window:
        """Bounds of a block."""
        return part(self.num_elements, block, self.team_size)

    def quota(self, block: int) -> int:
        """Elements that a block keeps: k / Q, in whole numbers that add up to k.

        ``floor((stop k + s) / n) - floor((start k + s) / n)``; the shift s moves by a block's length every
        step, and by one more where it would come back too early. So it takes every value below n once in any
        n steps, and a block of m elements gets m k elements in them, whatever divides what. A block of m
        elements never gets more than m in a step.
        """
        n, k = self.num_elements, self.num_selected
        start, stop = self.window(block)
        length = -(-n // self.team_size)
        num_offsets = math.gcd(n, length)
        shift = (self.step * length + self.step // (n // num_offsets) % num_offsets) % n
        return (stop * k + shift) // n - (start * k + shift) // n

    def bag(self, position: int, stage: int) -> list[int]:
        """The blocks that a position sends over the distance 2**stage.

        The paper's bag number ``stage + 1``: the next 2**stage blocks, or in the last bag what is left.
        """
        first = 1 << stage
        stop = min(2 * first, self.team_size)
        return [(position + offset) % self.team_size for offset in range(first, stop)]


def spardl_traffic(
    info: BucketInfo, layout: TeamLayout, wire: WireFormat, recursive: bool, notes_travel: bool
) -> tuple[Traffic, ...]:
    """All rounds of a step for one rank."""
    team, position = layout.team_and_position(info.rank)
    d, quota = layout.teams, layout.quota(position)
    # of a block, B-SAG may leave as few elements as one team gives
    exact = d == 1 or recursive

    def ends(words_of: Callable[[int], int], count: int) -> tuple[int, int]:
        return words_of(count if exact else -(-count // d)), words_of(count)

    def declared(kind: type, ranges: list[tuple[int, int]]) -> Traffic:
        low, high = 4 * sum(low for low, _ in ranges), 4 * sum(high for _, high in ranges)
        return Traffic(kind, low, None if exact else high)

    rounds = []
    for stage in reversed(range(layout.num_stages)):
        count = sum(layout.quota(block) for block in layout.bag(position, stage))
        rounds.append(Traffic(Exchange, 4 * mail_words(count, 0, info, wire)))
    if recursive:
        rounds += [
            Traffic(Exchange, 4 * mail_words(quota, (1 << stage) * notes_travel, info, wire))
            for stage in range(d.bit_length() - 1)
        ]
    else:
        given = ends(lambda count: 1 + mail_words(count, int(notes_travel), info, wire), quota)
        rounds += [declared(Exchange, [given] * num_sent) for num_sent in bruck_bags(d)]
    if not notes_travel:

        def part_words(count: int) -> int:
            start, stop = part(count, team, d)
            return mail_words(stop - start, 0, info, wire)

        return (*rounds, declared(AllGather, [ends(part_words, quota)]))

    def block_words(count: int) -> int:
        return 1 + mail_words(count, d, info, wire)

    for num_sent in bruck_bags(layout.team_size):
        blocks = [(position + offset) % layout.team_size for offset in range(num_sent)]
        rounds.append(declared(Exchange, [ends(block_words, layout.quota(block)) for block in blocks]))
    return tuple(rounds)
