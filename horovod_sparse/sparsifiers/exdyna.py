"""ExDyna: exclusive partitions whose bounds move until every rank selects about the same number."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from horovod_sparse.arrays import Indices
from horovod_sparse.checks import check_count
from horovod_sparse.errors import UnknownNameError
from horovod_sparse.sparsifiers.base import BucketInfo
from horovod_sparse.sparsifiers.exclusive import ExclusiveState, ExclusiveThreshold
from horovod_sparse.sparsifiers.rounds.sparse_vectors import Window

#: elements per part at which half of a step's imbalance is chance; 0 to 60 were tried in the simulator
_CHANCE = 10
#: imbalance that the paper's rule tolerates
_ALPHA = 1.05


@dataclass(frozen=True)
class Partitions:
    """Cuts a bucket into one contiguous part per rank, each of whole blocks of `sz_blk` elements.

    What is left over beyond all blocks belongs to the last part.
    """

    block_length: int
    num_blocks: np.ndarray

    def window(self, part: int, num_elements: int) -> Window:
        first = int(self.num_blocks[:part].sum())
        stop = (first + int(self.num_blocks[part])) * self.block_length
        return first * self.block_length, num_elements if part == self.num_blocks.size - 1 else stop


def partition(num_elements: int, size: int, num_blocks: int = 1024) -> Partitions:
    """Cuts a bucket into blocks and gives every rank nearly the same number of them.

    At least 4 P blocks are made, so that blocks can move; they shrink below 32 elements only when there are
    too few elements for that. Rounding the block length down makes room for further blocks, made too.

    Source: ExDyna, Algorithm 2. Departures: n_b is chosen from n and P (the printed form makes empty
    blocks below 32 * n_b elements), and less than one block is left over for the last part (the
    printed form leaves it up to half of the bucket, which no move of blocks could balance).

    Example:
        >>> partition(100_000, 3)
        Partitions(block_length=96, num_blocks=array([347, 347, 347]))
        >>> partition(10, 4)
        Partitions(block_length=1, num_blocks=array([3, 3, 2, 2]))
    """
    wanted = max(num_blocks, 4 * size)
    if num_elements < 32 * wanted:
        wanted = max(min(num_elements, 4 * size), num_elements // 32)
    block_length = max(num_elements // max(wanted, 1), 1)
    if block_length >= 32:
        block_length -= block_length % 32
    quotient, remainder = divmod(num_elements // block_length, size)
    parts = np.full(size, quotient, np.int64)
    parts[:remainder] += 1
    return Partitions(block_length, parts)


def move_borders(partitions: Partitions, counts: np.ndarray, num_elements: int) -> Partitions:
    """Moves each border by a block if one neighbour selected too much and the other too little.

    Source: ExDyna, Algorithm 3, lines 7-28, with min_blk = n_b / (4 P). Departure: when nothing was
    selected at all nothing moves (the printed form divides by zero).
    """
    blocks, k = partitions.num_blocks.copy(), counts.astype(np.float64)
    mean = float(k.sum()) / blocks.size
    if mean == 0.0:
        return partitions
    min_blocks = int(blocks.sum()) // (4 * blocks.size)
    moved_elements = partitions.block_length * float(k.sum()) / num_elements
    for i in range(blocks.size - 1):
        left, right = k[i] / mean, k[i + 1] / mean
        if left > _ALPHA and right < 1.0 / _ALPHA:
            source, target = i, i + 1
        elif left < 1.0 / _ALPHA and right > _ALPHA:
            source, target = i + 1, i
        else:
            continue
        if blocks[source] - 1 < min_blocks:
            continue
        blocks[source] -= 1
        blocks[target] += 1
        k[source] -= moved_elements
        k[target] += moved_elements
    return replace(partitions, num_blocks=blocks)


def move_proportionally(partitions: Partitions, selected: Indices, *, step: float = 0.5) -> Partitions:
    """Moves every border the share `step` of the way to where all parts would have selected equally many.

    Ours, beside the paper's rule. All ranks know not only how many elements each part gave but which,
    so the boundaries that would have given equal counts are known to a block: quantiles of the selected
    positions. Counts alone, with elements taken as evenly spread within a part, are not enough: where
    a few dense blocks lie near a boundary, such a step jumps over them, and jumps back, for ever. Going
    part of the way averages out the chance in single steps, less where there is more of it: bounds that
    follow chance make a rank search anew where it searched last, and the union count suffers. Every
    part keeps one block.
    """
    blocks = partitions.num_blocks
    size, total = blocks.size, int(blocks.sum())
    if size == 1 or total < size or selected.size == 0:
        return partitions
    per_block = np.bincount(np.minimum(selected // partitions.block_length, total - 1), minlength=total)
    # a little for every block: where nothing was selected the cumulative count still has to rise
    cumulative = np.concatenate([[0.0], np.cumsum(per_block + selected.size * 1e-3 / total)])
    ideal = np.interp(np.arange(1, size) * cumulative[-1] / size, cumulative, np.arange(total + 1))
    bounds = np.cumsum(blocks)[:-1]
    step *= selected.size / (selected.size + _CHANCE * size)
    inner = np.rint(bounds + step * (ideal - bounds)).astype(np.int64)
    for i in range(size - 1):  # from the left: room for this part; from the right: room for those behind
        low = (inner[i - 1] if i else 0) + 1
        inner[i] = min(max(inner[i], low), total - (size - 1 - i))
    return replace(partitions, num_blocks=np.diff(np.concatenate([[0], inner, [total]])))


#: rounds of P steps, in the last of which bounds stay
_LAPS = 16


@dataclass(frozen=True)
class ExDynaState(ExclusiveState):
    """State of ExDyna, equal on all ranks: the state of the threshold, and the present partitions."""

    partitions: Partitions = field(default_factory=lambda: Partitions(1, np.ones(1, np.int64)))


@dataclass(frozen=True, kw_only=True)
class ExDyna(ExclusiveThreshold):
    """Rank i selects |acc| >= threshold in partition (t + i) mod P; borders of partitions follow the counts.

    Two rounds, as MiCRO. Where magnitudes differ along the bucket, equal parts make some ranks select
    several times more than others; ExDyna moves whole blocks between neighbouring parts. All ranks know
    the gathered indices, so this costs no message.

    Args:
        threshold: "sketch" or "paper"; see MiCRO.
        rebalance: "proportional" (default: bounds move up to half the way to where counts would have
            been equal), or "paper" (one block per pair of neighbours and step).
        num_blocks: n_b for large buckets.

    Source: ExDyna (2024), Algorithms 1-5; constants from its public program. Departures: the sketch
    rule, the proportional move, n_b chosen from n and P for small buckets, and bounds that rest for P of
    every 16 P steps.
    """

    name: ClassVar[str] = "exdyna"

    rebalance: str = "proportional"
    num_blocks: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rebalance not in ("proportional", "paper"):
            raise UnknownNameError("rebalance", self.rebalance, ("proportional", "paper"))
        check_count("num_blocks", self.num_blocks)

    def init(self, info: BucketInfo) -> ExDynaState:
        return ExDynaState(partitions=partition(info.num_elements, info.size, self.num_blocks))

    def window(self, state: ExDynaState, info: BucketInfo) -> Window:
        return state.partitions.window((state.turn + info.rank) % info.size, info.num_elements)

    def learn_union(
        self, state: ExDynaState, info: BucketInfo, counts: np.ndarray, union: Indices
    ) -> ExDynaState:
        """Returns the next state, with blocks moved between partitions; not in each 16th round of P steps.

        In that one every rank searches every part. Where bounds move in step with the turns, an element at a
        bound may be in another rank's part in every step, and one rank's share of it be held back for ever.
        """
        partitions = state.partitions
        if state.turn // info.size % _LAPS == _LAPS - 1:
            return state
        if self.rebalance == "proportional":
            return replace(state, partitions=move_proportionally(partitions, union))
        # rank i's count belongs to the partition that it searched, (t + i) mod P
        by_part = np.empty_like(counts)
        by_part[(state.turn + np.arange(info.size)) % info.size] = counts
        return replace(state, partitions=move_borders(partitions, by_part, info.num_elements))
