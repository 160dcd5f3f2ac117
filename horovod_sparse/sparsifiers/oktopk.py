"""Ok-Topk: thresholds instead of selections, balanced regions, a balanced all-gather."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays import Accumulator, FoldReport, Indices, Values
from horovod_sparse.checks import check_count
from horovod_sparse.collectives import LOCAL, AllGather, AllToAll, Synchronization, rank_part
from horovod_sparse.sparsifiers import BucketInfo, SparseSum, Sparsifier, SparsifierState, Traffic
from horovod_sparse.sparsifiers.base import exchange_selections
from horovod_sparse.sparsifiers.rounds.sparse_vectors import (
    SparseVector,
    cut_and_pack,
    keeps_discards,
    not_among,
    reduce_in_regions,
    region_traffic,
)
from horovod_sparse.wire import unpack_sum


@dataclass(frozen=True)
class OkTopkState(SparsifierState):
    """State of Ok-Topk: both thresholds, and where the ranks' regions begin."""

    #: for this rank's accumulator; 0 before the first step
    local_threshold: float = field(default=0.0, metadata=LOCAL)
    #: for the sums; 0 where all of them are to be kept
    global_threshold: float = 0.0
    #: int64 [P - 1], where the regions of ranks 1, 2, ... begin.
    bounds: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def equal_regions(info: BucketInfo) -> NDArray[np.int64]:
    return np.array([rank_part(info.num_elements, r, info.size)[0] for r in range(1, info.size)], np.int64)


def propose_regions(selection: Indices, info: BucketInfo) -> NDArray[np.int64]:
    """Returns where regions 1 to P - 1 begin, so that each holds as many of this rank's selected indices."""
    if not selection.size:
        return equal_regions(info)
    return selection[np.arange(1, info.size) * selection.size // info.size].astype(np.int64)


def scaled_threshold(threshold: float, count: int, k: int, band: tuple[float, float], factor: float) -> float:
    """Returns the threshold, raised (lowered) by `factor` if `count` is above (below) the `band` around k."""
    low, high = band
    if count < low * k:
        return threshold / factor
    return threshold * factor if count > high * k else threshold


#: ratio of successive orders: how many of its sums a rank keeps is known to a tenth
_FINENESS = 1.1


@functools.lru_cache(maxsize=64)
def reported_places(k: int) -> NDArray[np.int64]:
    """Returns which of k sorted sums (1: largest) a message reports: 1 to 10, then each a tenth further."""
    orders = [1]
    while orders[-1] < k:
        orders.append(min(k, max(orders[-1] + 1, math.ceil(orders[-1] * _FINENESS))))
    return np.array(orders, np.int64)


def threshold_and_counts(
    magnitudes: NDArray[np.floating], lengths: NDArray[np.int64], k: int
) -> tuple[float, NDArray[np.int64]]:
    """Returns a threshold that about k of all ranks' sums reach, and how many sums of each rank reach it.

    `magnitudes` [P, orders] are each rank's sums at the `reported_places`, `lengths` how many sums each rank
    has. At least k pass; the excess is under a tenth of one rank's sums, unless magnitudes are equal.
    """
    if lengths.sum() <= k:
        return 0.0, lengths
    orders = np.minimum(reported_places(k), lengths[:, None])
    new = np.diff(orders, axis=1, prepend=0).ravel()
    falling = np.argsort(-magnitudes, axis=None, kind="stable")
    enough = np.searchsorted(np.cumsum(new[falling]), k)
    threshold = float(magnitudes.ravel()[falling[enough]])
    return threshold, np.where(magnitudes >= threshold, orders, 0).max(axis=1)


#: the sums are spread out again if one rank has more than this many times its share of them
_IMBALANCE = 4
#: counts within these multiples of k leave the thresholds alone; outside they move by these factors
_LOCAL_BAND, _LOCAL_FACTOR = (2 / 3, 5 / 4), 1.012
_GLOBAL_BAND, _GLOBAL_FACTOR = (2 / 3, 4 / 3), 1.008


_Numbers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class OkTopk(Sparsifier):
    """Ranks sum up large elements by region, then send every rank the sums above a global threshold.

    ``sum = {j: |s_j| >= t_global}, s = sum_i acc_i [|acc_i| >= t_i]``

    Four rounds: an all-to-all to the owners of P regions, an allgather of counts, an all-to-all that
    spreads the sums evenly where they are not, and an allgather of them. Both thresholds are of this
    step: the local one is the exact order statistic, the global one follows from about a hundred order
    statistics of each rank's sums, which travel with the counts. Regions are
    drawn anew every `region_steps` steps, so that each receives about as much. Density is global: about
    k elements come back. A rank's residual is cleared where its own selection came back; in one of 16
    steps what did not pass stays, summed up, with the owner of its region.

    Args:
        threshold_steps: 0, or as the paper has it: thresholds are found exactly every so many steps, from
            all magnitudes, and adjusted by their counts in between.
        region_steps: how often regions are drawn anew.

    Source: Li & Hoefler, PPoPP 2022. Departures: thresholds of every step, since kept ones let many times k
    pass while the residual grows; new regions hold from the next step on, and the paper's exact
    global threshold is found from magnitudes that travel with the counts, so that the rounds of every
    step are the same; a threshold of 0 (an all-zero gradient) is found anew in the next step; the
    paper always leaves with its rank what did not pass, where parts that cancel never meet.
    """

    name: ClassVar[str] = "oktopk"
    density_scope: ClassVar[Literal["per rank", "global"]] = "global"

    threshold_steps: int = 0
    region_steps: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("threshold_steps", self.threshold_steps, "a number of steps, or 0", low=0)
        check_count("region_steps", self.region_steps, "a number of steps, 1 or more")

    def init(self, info: BucketInfo) -> OkTopkState:
        return OkTopkState(bounds=equal_regions(info))

    def synchronize(
        self, accumulator: Accumulator, state: OkTopkState, info: BucketInfo
    ) -> Synchronization[tuple[SparseSum, OkTopkState]]:
        k = self.num_selected(info, state.step)
        indices, local_threshold = self._select(accumulator, state, k)
        selection = SparseVector(indices, accumulator.take(indices))
        report = accumulator.report
        regions = list(itertools.pairwise([0, *state.bounds.tolist(), info.num_elements]))
        total, arrived, error = yield from reduce_in_regions(selection, regions, report, info, self.wire)

        pruned = yield from self._prune(total, indices, state, info, k)
        kept, selected, sizes, threshold, bounds = pruned
        spread, kept_error = yield from self._rebalance(kept, sizes, info)
        shared, shared_error = spread.rounded(self.wire)
        sum_ = yield from exchange_selections(accumulator, shared.indices, shared.values, info, self.wire)

        applied = ~not_among(indices, sum_.indices)
        accumulator.clear(indices[applied])
        left = applied
        if keeps_discards(state.step):  # the others leave, too, for the owners of their regions
            accumulator.put(indices[~applied], np.zeros_like(selection.values[~applied]))
            dropped = not_among(total.indices, kept.indices)
            accumulator.add(total.indices[dropped], total.values[dropped])
            left = np.ones_like(applied)
        for where, lost in (
            (indices[left], None if error is None else error[left]),
            (kept.indices, kept_error),
            (shared.indices, shared_error),
        ):
            if lost is not None:
                accumulator.add(where, lost)
        facts = {"local_threshold": local_threshold, "threshold": threshold}
        if self.threshold_steps:
            passed = int(sizes.sum())
            local_threshold = scaled_threshold(local_threshold, indices.size, k, _LOCAL_BAND, _LOCAL_FACTOR)
            threshold = scaled_threshold(threshold, passed, k, _GLOBAL_BAND, _GLOBAL_FACTOR)
        after = replace(state, local_threshold=local_threshold, global_threshold=threshold, bounds=bounds)
        return SparseSum(sum_.indices, sum_.values, selected, arrived.notes, facts), after

    def _select(self, accumulator: Accumulator, state: OkTopkState, k: int) -> tuple[Indices, float]:
        """Returns the indices of the elements that reach the local threshold, and that threshold."""
        if k == accumulator.num_elements:  # everything, zeros too
            return np.arange(k, dtype=np.int32), state.local_threshold
        threshold = state.local_threshold
        if self._computes_thresholds(state.step) or not threshold:
            threshold = accumulator.kth_magnitude(k)
        return accumulator.at_least(threshold), threshold

    def _computes_thresholds(self, step: int) -> bool:
        """True if this step computes thresholds from magnitudes, and does not only adjust the last ones."""
        return self.threshold_steps == 0 or step % self.threshold_steps == 0

    def _prune(
        self, total: SparseVector, selection: Indices, state: OkTopkState, info: BucketInfo, k: int
    ) -> Synchronization[tuple[SparseVector, _Numbers, _Numbers, float, _Numbers]]:
        """Returns this rank's sums that reach the global threshold; an allgather gives the other results.

        These are: numbers of selected and kept elements by rank, the threshold, and the next regions.

        A message is: how many the rank selected, how many sums it has (or how many of them pass, where the
        threshold is known), its proposal for the regions (in some steps only), and magnitudes: those of
        `reported_places`, so that the message is as long in every step of one k; or with `threshold_steps`
        all of them, in the steps that find the threshold exactly.
        """
        magnitudes, of_every_step = np.abs(total.values), self.threshold_steps == 0
        falling = np.argsort(-magnitudes, kind="stable") if of_every_step else np.empty(0, np.int64)
        finds = self._computes_thresholds(state.step) or not state.global_threshold
        length, reported = len(total), magnitudes
        if of_every_step:
            orders = reported_places(k)
            reported = np.zeros(orders.size, magnitudes.dtype)
            if length:
                reported = magnitudes[falling[np.minimum(orders, length) - 1]]
        elif not finds:
            length, reported = int((magnitudes >= state.global_threshold).sum()), magnitudes[:0]
        new_regions = state.step % self.region_steps == 0
        proposal = propose_regions(selection, info) if new_regions else state.bounds[:0]
        numbers = np.array([selection.size, length, *proposal], np.int32)
        gathered = np.asarray((yield AllGather(np.concatenate([numbers, reported.view(np.int32)]))))

        heads, theirs, begin = [], [], 0
        for _ in range(info.size):
            heads.append(gathered[begin : begin + numbers.size])
            count = int(heads[-1][1]) if finds and not of_every_step else reported.size
            begin += numbers.size
            end = begin + count * (magnitudes.itemsize // 4)
            theirs.append(gathered[begin:end].copy().view(magnitudes.dtype))
            begin = end
        selected, sizes, *proposals = np.array(heads, np.int64).T
        bounds = np.array([one.mean() for one in proposals], np.int64) if new_regions else state.bounds

        threshold = state.global_threshold
        if of_every_step:
            threshold, sizes = threshold_and_counts(np.array(theirs), sizes, k)
            kept = np.sort(falling[: sizes[info.rank]])
        else:
            if finds:
                everyone = np.concatenate(theirs)
                threshold, order = 0.0, everyone.size - k
                if k < info.num_elements and order > 0:
                    threshold = float(np.partition(everyone, order)[order])
                sizes = np.array([(one >= threshold).sum() for one in theirs], np.int64)
            kept = np.flatnonzero(magnitudes >= threshold)
        return total[kept], selected, sizes, threshold, bounds

    def _rebalance(
        self, kept: SparseVector, sizes: NDArray[np.int64], info: BucketInfo
    ) -> Synchronization[tuple[SparseVector, Values | None]]:
        """Spreads sums evenly over ranks if one has 4 times its share; returns this rank's, and errors."""
        union = int(sizes.sum())
        if info.size * int(sizes.max()) <= _IMBALANCE * union:
            yield AllToAll((np.empty(0, np.int32),) * info.size)
            return kept, None
        first = int(sizes[: info.rank].sum())
        parts = []
        for rank in range(info.size):
            edges = rank_part(union, rank, info.size)
            start, stop = (min(max(edge - first, 0), len(kept)) for edge in edges)
            parts.append(kept[start:stop])
        messages, error = cut_and_pack(parts, FoldReport(), info, self.wire)
        arrived = yield AllToAll(messages)
        kind = self.wire, info.num_elements, info.value_dtype
        sum_ = unpack_sum(np.concatenate(arrived), info.size, *kind)
        return SparseVector(sum_.indices, sum_.values), error

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        most = min(info.num_elements, int(counts.sum()))
        words = [self.wire.message_words(count, info.num_elements, info.value_dtype) for count in (0, most)]
        num_counts = 2 + (info.size - 1 if step % self.region_steps == 0 else 0)
        per_value = info.value_dtype.itemsize // 4
        magnitudes = (0, most * per_value)
        if self.threshold_steps == 0:
            magnitudes = (reported_places(self.num_selected(info, step)).size * per_value,) * 2
        return (
            region_traffic(int(counts[info.rank]), info, self.wire),
            Traffic(AllGather, 4 * (num_counts + magnitudes[0]), 4 * (num_counts + magnitudes[1])),
            Traffic(AllToAll, 0, 4 * (info.size - 1) * words[1]),
            Traffic(AllGather, 4 * words[0], 4 * words[1]),
        )
