"""MiCRO: every rank searches its own part of the vector, so that no element is selected twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from horovod_sparse.collectives import rank_part
from horovod_sparse.sparsifiers.base import BucketInfo
from horovod_sparse.sparsifiers.exclusive import ExclusiveState, ExclusiveThreshold
from horovod_sparse.sparsifiers.rounds.sparse_vectors import Window


@dataclass(frozen=True, kw_only=True)
class MiCRO(ExclusiveThreshold):
    """Rank i selects |acc| >= threshold in part (t + i) mod P; all ranks add up their values there.

    Two rounds: an allgather of the selected indices, and an allreduce of everyone's accumulator at
    their union. Density is global: the union is k, whatever P is.

    Args:
        threshold: "sketch" (default: exact order statistic of this step) or "paper" (scaled by the
            count; the first one is a guess that takes hundreds of steps to settle).

    Source: MiCRO (HiPC 2023), Algorithm 1. Departures: the sketch rule; equal parts take the
    remainder one element each, as in the public program.
    """

    name: ClassVar[str] = "micro"

    def window(self, state: ExclusiveState, info: BucketInfo) -> Window:
        return rank_part(info.num_elements, (state.turn + info.rank) % info.size, info.size)
