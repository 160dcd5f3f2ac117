"""gTop-k: selections are added pairwise up a tree, k elements at every stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from horovod_sparse.arrays import Accumulator
from horovod_sparse.collectives import Exchange, Synchronization
from horovod_sparse.sparsifiers.base import BucketInfo, SparseSum, Sparsifier, SparsifierState, Traffic
from horovod_sparse.sparsifiers.rounds.pairs import Mail, ceil_log2, mail_words
from horovod_sparse.sparsifiers.rounds.sparse_vectors import SparseVector, not_among, round_for_wire


@dataclass(frozen=True, kw_only=True)
class GTopK(Sparsifier):
    """Selections of k elements go up a binary tree; each stage adds two and keeps the k largest.

    ``sum = T_k(... T_k(T_k(acc_0) + T_k(acc_1)) ...)``, T_k keeping the k largest magnitudes

    ``ceil(log2 P)`` rounds up to rank 0 and as many down again, k indices and k values each. Density is
    global: exactly k elements come back. A rank's selection leaves its residual when it is sent; what a
    stage drops goes into the residual of the rank that dropped it. Nothing is lost, though it may come
    back through another rank.

    Source: Shi et al., ICDCS 2019 (gTop-k S-SGD). Departures: any number of ranks, not powers of two
    only. The paper puts back what did not end in the global k, at the rank it came from; what was
    dropped on the way at an index that did end there is lost. Here it is not.
    """

    name: ClassVar[str] = "gtopk"
    density_scope: ClassVar[Literal["per rank", "global"]] = "global"

    def synchronize(
        self, accumulator: Accumulator, state: SparsifierState, info: BucketInfo
    ) -> Synchronization[tuple[SparseSum, SparsifierState]]:
        k = self.num_selected(info, state.step)
        mail = Mail(accumulator.report, info, self.wire)
        indices = accumulator.largest(k)
        total = SparseVector(indices, accumulator.take(indices))
        accumulator.put(indices, np.zeros_like(total.values))
        everyone = range(info.size)

        for distance in _stage_distances(info.size):
            parent, child = _parent(info.rank, distance), _child(info.rank, distance, info.size)
            if parent is not None:
                seen = round_for_wire(total, accumulator, self.wire)
                message = mail.write(seen, _subtree(info.rank, distance, info))
                yield Exchange({parent: message}, ())
            elif child is not None:
                arrived = yield Exchange({}, (child,))
                theirs = mail.read(arrived[child], _subtree(child, distance, info))
                total, dropped = (total + theirs).split_largest(k)
                accumulator.add(dropped.indices, dropped.values)
            else:
                yield Exchange({}, ())

        if info.rank == 0:
            total = round_for_wire(total, accumulator, self.wire)
        message = mail.write(total, everyone) if info.rank == 0 else np.empty(0, np.int32)
        for distance in reversed(_stage_distances(info.size)):
            parent, child = _parent(info.rank, distance), _child(info.rank, distance, info.size)
            if parent is not None:
                message = (yield Exchange({}, (parent,)))[parent]
            else:
                yield Exchange({} if child is None else {child: message}, ())
        if info.rank != 0:
            total = mail.read(message, everyone)

        # a velocity is stale only where the step has applied something
        accumulator.mask(indices[~not_among(indices, total.indices)])
        return mail.sum_of(total, k), state

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """Declares one message to the parent (unless on rank 0), and one down to each child."""
        k = int(counts[info.rank])
        up, down = [], []
        for distance in _stage_distances(info.size):
            sends_up = _parent(info.rank, distance) is not None
            sends_down = _child(info.rank, distance, info.size) is not None
            notes = len(_subtree(info.rank, distance, info))
            up.append(4 * mail_words(k, notes, info, self.wire) if sends_up else 0)
            down.append(4 * mail_words(k, info.size, info, self.wire) if sends_down else 0)
        return tuple(Traffic(Exchange, num_bytes) for num_bytes in (*up, *reversed(down)))


def _stage_distances(size: int) -> list[int]:
    return [1 << stage for stage in range(ceil_log2(size))]


def _parent(rank: int, distance: int) -> int | None:
    """Returns the rank that receives this rank's sum at a stage, or None if it sends none."""
    return rank - distance if rank % (2 * distance) == distance else None


def _child(rank: int, distance: int, size: int) -> int | None:
    """Returns the rank whose sum this rank receives at a stage, or None if it receives none."""
    return rank + distance if rank % (2 * distance) == 0 and rank + distance < size else None


def _subtree(rank: int, distance: int, info: BucketInfo) -> range:
    """Returns the ranks whose selections a rank's sum contains before a stage."""
    return range(rank, min(rank + distance, info.size))
