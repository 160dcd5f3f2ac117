"""ExDyna: exclusive partitions whose bounds move until every rank selects about the same number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays.protocol import Indices
from horovod_sparse.checks import check_count, check_number
from horovod_sparse.errors import UnknownNameError
from horovod_sparse.sparsifiers.base import BucketInfo
from horovod_sparse.sparsifiers.exclusive import ExclusiveState, ExclusiveThreshold
from horovod_sparse.sparsifiers.partitions import Partitions, move_one_block, move_proportionally, partition
from horovod_sparse.sparsifiers.windows import Window

__all__ = ["ExDyna", "ExDynaState"]

#: rounds of P steps, in the last of which bounds stay
_LAPS = 16


@dataclass
class ExDynaState(ExclusiveState):
    """State of ExDyna, the same on all ranks.

    Attributes:
        step: synchronizations done.
        threshold: of the threshold rule.
        partitions: where the parts lie now.
    """

    partitions: Partitions = field(default_factory=lambda: Partitions(1, np.ones(1, np.int64)))


@dataclass(frozen=True, kw_only=True)
class ExDyna(ExclusiveThreshold):
    """Rank i selects |acc| >= threshold in partition (t + i) mod P; bounds follow the counts.

    Two rounds, as MiCRO. Where magnitudes differ along the bucket, equal parts make some ranks select
    several times more than others; ExDyna moves whole blocks between neighbouring parts. All ranks know
    the gathered indices, so this costs no message.

    Args:
        density: k / n of the union, in (0, 1].
        threshold: "sketch" or "paper", or a rule; see MiCRO.
        rebalance: "proportional" (default: bounds move up to half the way to where counts would have
            been equal), "paper" (one block per pair of neighbours and step), or "none".
        num_blocks: n_b for large buckets.
        alpha: imbalance that the paper's rule tolerates.
        blocks_per_move: blk_move of the paper's rule.
        quantum: see `Sparsifier`.

    Source: ExDyna (2024), Algorithms 1-5; constants from its public program. Departures: the sketch
    rule, the proportional move, n_b chosen from n and P for small buckets, and bounds that rest for P of
    every 16 P steps.

    Example:
        >>> ExDyna(density=0.001).describe()
        'exdyna:density=0.001'
    """

    name: ClassVar[str] = "exdyna"

    rebalance: str = "proportional"
    num_blocks: int = 1024
    alpha: float = 1.05
    blocks_per_move: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rebalance not in ("proportional", "paper", "none"):
            raise UnknownNameError("rebalance rule", self.rebalance, ("proportional", "paper", "none"))
        check_number(
            "alpha", self.alpha, "a number of 1 or more", low=1.0, high=float("inf"), include_low=True
        )
        for argument in ("num_blocks", "blocks_per_move"):
            check_count(argument, getattr(self, argument), "a whole number, 1 or more")

    def init(self, info: BucketInfo) -> ExDynaState:
        """Equal parts, no threshold yet."""
        return ExDynaState(partitions=partition(info.num_elements, info.size, self.num_blocks))

    def window(self, state: ExDynaState, info: BucketInfo) -> Window:
        """Partition (t + i) mod P."""
        return state.partitions.window((state.turn + info.rank) % info.size, info.num_elements)

    def observe(self, state: ExDynaState, info: BucketInfo, counts: np.ndarray, union: Indices) -> None:
        """Moves blocks, but in every sixteenth round of P steps.

        In that one every rank searches every part. Where bounds move in step with the turns, an element at a
        bound may be in another rank's part in every step, and one rank's share of it be held back for ever.
        """
        if state.turn // info.size % _LAPS == _LAPS - 1:
            return
        if self.rebalance == "proportional":
            move_proportionally(state.partitions, union)
        elif self.rebalance == "paper":
            # rank i's count belongs to the partition that it searched, (t + i) mod P
            by_part = np.empty_like(counts)
            by_part[(state.turn + np.arange(info.size)) % info.size] = counts
            move_one_block(
                state.partitions, by_part, info.num_elements, alpha=self.alpha, num_moved=self.blocks_per_move
            )
