"""Who has which place in SparDL: teams, blocks, how many elements each block keeps, bags."""

from __future__ import annotations

import math
from dataclasses import dataclass

from horovod_sparse.sparsifiers.mail import ceil_log2
from horovod_sparse.sparsifiers.windows import Window, equal_part

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """P ranks in d teams of Q = P / d; the bucket in Q blocks, in every team alike.

    Ranks T * Q ... T * Q + Q - 1 are team T, so that ranks of one host are of one team where that is
    possible.

    Args:
        size: P.
        teams: d, a divisor of P.
        num_elements: n.
        num_selected: k, of the union.
        step: from 0; says which blocks get one element more where k / Q is not whole.

    Example:
        >>> layout = Layout(size=6, teams=1, num_elements=60, num_selected=12)
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

    def place(self, rank: int) -> tuple[int, int]:
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
        return equal_part(self.num_elements, self.team_size, block)

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
