"""CLT-k: the ranks take turns as leader, whose top-k everyone sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from horovod_sparse.arrays import Accumulator
from horovod_sparse.collectives import Broadcast, Synchronization
from horovod_sparse.sparsifiers.base import BucketInfo, SparseSum, Sparsifier, SparsifierState, Traffic
from horovod_sparse.sparsifiers.rounds.shared import sum_at, sum_traffic


@dataclass(frozen=True, kw_only=True)
class CLTK(Sparsifier):
    """Rank t mod P selects its k largest magnitudes; every rank sends its own values at those indices.

    ``leader = t mod P,  selection = arg top-k |acc_leader|,  sum = sum_i acc_i[selection]``

    Two rounds: a broadcast of k indices from the leader, and an allreduce of k values. Density is
    global: the union is exactly k. Only the leader searches, so others wait for it, and what a rank
    alone finds important waits for its turn.

    Source: ScaleCom (Chen et al., NeurIPS 2020), Algorithm 1, cyclic local top-k. Departure: plain
    error feedback, which is its low-pass filter of the residual with beta = 1.
    """

    name: ClassVar[str] = "cltk"
    density_scope: ClassVar[Literal["per rank", "global"]] = "global"

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[tuple[SparseSum, SparsifierState]]:
        leader = state.step % info.size
        k = self.num_selected(info, state.step)
        chosen = accumulator.largest(k) if info.rank == leader else np.zeros(k, np.int32)
        indices = yield Broadcast(chosen, leader)
        counts = np.full(info.size, k)
        return (yield from sum_at(accumulator, indices, counts, info, self.wire)), state

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        k = int(counts[0])
        leads = info.rank == step % info.size
        return (Traffic(Broadcast, 4 * k if leads else 0), *sum_traffic(k, info, self.wire))
