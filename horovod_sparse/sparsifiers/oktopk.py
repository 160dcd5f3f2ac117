"""Ok-Topk: thresholds instead of selections, balanced regions, a balanced all-gather."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.arrays import Accumulator, FoldReport, Indices, Values
from horovod_sparse.checks import LARGEST, check_count, out_of_range
from horovod_sparse.collectives import LOCAL, SCALED, AllGather, AllToAll, Synchronization
from horovod_sparse.sparsifiers.base import (
    BucketInfo,
    SparseSum,
    Sparsifier,
    SparsifierState,
    Traffic,
    exchange_selections,
)
from horovod_sparse.sparsifiers.rounds.regions import (
    Window,
    cut_and_pack,
    equal_part,
    reduce_in_regions,
    split_traffic,
)
from horovod_sparse.sparsifiers.rounds.sparse_vectors import SparseVector, discards_meet, missing_in, rounded
from horovod_sparse.wire import unpack_sum


@dataclass
class OkTopkState(SparsifierState):
    """State of Ok-Topk.

    Attributes:
        step: synchronizations done.
        local_threshold: for this rank's accumulator; 0 before the first step.
        global_threshold: for the sums; 0 where all of them are to be kept.
        bounds: int64 [P - 1], where the regions of ranks 1, 2, ... begin.
    """

    step: int = 0
    local_threshold: float = field(default=0.0, metadata={**LOCAL, **SCALED})
    global_threshold: float = field(default=0.0, metadata=SCALED)
    bounds: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def flaw(self, _fresh: OkTopkState) -> str:
        """Of a loaded one: see `out_of_range`."""
        if (np.diff(self.bounds, prepend=0) < 0).any():
            return f"bounds is {self.bounds.tolist()}, which do not ascend from 0"
        return out_of_range(self, local_threshold=(0, LARGEST), global_threshold=(0, LARGEST))


def equal_regions(info: BucketInfo) -> NDArray[np.int64]:
    """Bounds of P equal regions."""
    return np.array([equal_part(info.num_elements, info.size, r)[0] for r in range(1, info.size)], np.int64)


def regions_of(bounds: NDArray[np.int64], info: BucketInfo) -> list[Window]:
    """The regions between the bounds."""
    edges = [0, *bounds.tolist(), info.num_elements]
    return list(itertools.pairwise(edges))


def propose_regions(selection: Indices, info: BucketInfo) -> NDArray[np.int64]:
    """Bounds that cut this rank's selection into P equal numbers of elements."""
    if not selection.size:
        return equal_regions(info)
    return selection[np.arange(1, info.size) * selection.size // info.size].astype(np.int64)


def steered(threshold: float, count: int, k: int, band: tuple[float, float], factor: float) -> float:
    """The threshold for the next step: lower if fewer than `band` times k passed, higher if more.

    Example:
        >>> [steered(1.0, count, 100, (0.6, 1.2), 1.25) for count in (50, 100, 150)]
        [0.8, 1.0, 1.25]
    """
    low, high = band
    if count < low * k:
        return threshold / factor
    return threshold * factor if count > high * k else threshold


#: an order by the one before it: what a rank keeps is known to a tenth
_FINENESS = 1.1


@functools.lru_cache(maxsize=64)
def told_orders(k: int) -> NDArray[np.int64]:
    """Which of its magnitudes a rank tells: the largest ten, then every one a tenth further down, up to k.

    Example:
        >>> told_orders(20)
        array([ 1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 13, 15, 17, 19, 20])
    """
    orders = [1]
    while orders[-1] < k:
        orders.append(min(k, max(orders[-1] + 1, math.ceil(orders[-1] * _FINENESS))))
    return np.array(orders, np.int64)


def shares_of(
    told: NDArray[np.floating], lengths: NDArray[np.int64], k: int
) -> tuple[float, NDArray[np.int64]]:
    """A threshold that about k of all ranks' sums pass, and how many each rank keeps; all of them, if fewer.

    `told` are magnitudes of `told_orders` [P, orders], `lengths` the sums that each rank has. Kept are k or
    more in all, by less than a tenth of one rank's unless magnitudes are equal.

    Example:
        >>> told = np.array([[9.0, 5.0, 1.0], [7.0, 6.0, 6.0]])
        >>> shares_of(told, np.array([3, 2]), 3)
        (6.0, array([1, 2]))
    """
    if lengths.sum() <= k:
        return 0.0, lengths
    orders = np.minimum(told_orders(k), lengths[:, None])
    new = np.diff(orders, axis=1, prepend=0).ravel()
    falling = np.argsort(-told, axis=None, kind="stable")
    enough = np.searchsorted(np.cumsum(new[falling]), k)
    threshold = float(told.ravel()[falling[enough]])
    return threshold, np.where(told >= threshold, orders, 0).max(axis=1)


#: the sums are spread out again if one rank has more than this many times its share of them
_IMBALANCE = 4
#: counts within these multiples of k leave the thresholds alone; outside they move by these factors
_LOCAL_BAND, _LOCAL_FACTOR = (2 / 3, 5 / 4), 1.012
_GLOBAL_BAND, _GLOBAL_FACTOR = (2 / 3, 4 / 3), 1.008


@dataclass(frozen=True, kw_only=True)
class OkTopk(Sparsifier):
    """What passes a local threshold is summed up by region; what passes a global one there comes back.

    ``sum = {j: |s_j| >= t_global}, s = sum_i acc_i [|acc_i| >= t_i]``

    Four rounds: an all-to-all to the owners of P regions, an allgather of counts, an all-to-all that
    spreads the sums evenly where they are not, and an allgather of them. Both thresholds are of this
    step: the local one is the exact order statistic, the global one follows from about a hundred order
    statistics of each rank's sums, which travel with the counts. Regions are
    drawn anew every `region_steps` steps, so that each receives about as much. Density is global: about
    k elements come back. A rank's residual is cleared where its own selection came back; in one of 16
    steps what did not pass stays, summed up, with the owner of its region.

    Args:
        density: k / n of the union, in (0, 1].
        threshold_steps: 0, or as the paper has it: thresholds are found exactly every so many steps, from
            all magnitudes, and steered by their counts in between.
        region_steps: how often regions are drawn anew.

    Source: Li & Hoefler, PPoPP 2022. Departures: thresholds of every step, since kept ones let many times k
    pass while the residual grows; new regions hold from the next step on, and the paper's exact
    global threshold is found from magnitudes that travel with the counts, so that the rounds of every
    step are the same; a threshold of 0 (an all-zero gradient) is found anew in the next step; the
    paper always leaves with its rank what did not pass, where parts that cancel never meet.

    Example:
        >>> OkTopk(density=0.01).rounds(4) == (AllToAll, AllGather, AllToAll, AllGather)
        True
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
    ) -> Synchronization[SparseSum]:
        k = self.num_selected(info, state)
        indices = self._select(accumulator, state, k)
        selection = SparseVector(indices, accumulator.take(indices))
        regions, report = regions_of(state.bounds, info), accumulator.report
        total, arrived, error = yield from reduce_in_regions(selection, regions, report, info, self.wire)

        told = self._prune_now if self.threshold_steps == 0 else self._prune
        selected, sizes, kept = yield from told(total, indices, state, info, k)
        spread, kept_error = yield from self._spread(kept, sizes, info)
        shared, shared_error = rounded(spread, self.wire)
        gathered = yield from exchange_selections(accumulator, shared.indices, shared.values, info, self.wire)
        sum_ = SparseSum.of(gathered)

        applied = ~missing_in(indices, sum_.indices)
        accumulator.clear(indices[applied])
        left = applied
        if discards_meet(state.step):  # the others leave, too, for the owners of their regions
            accumulator.put(indices[~applied], np.zeros_like(selection.values[~applied]))
            dropped = missing_in(total.indices, kept.indices)
            accumulator.add(total.indices[dropped], total.values[dropped])
            left = np.ones_like(applied)
        for where, lost in (
            (indices[left], None if error is None else error[left]),
            (kept.indices, kept_error),
            (shared.indices, shared_error),
        ):
            if lost is not None:
                accumulator.add(where, lost)
        facts = {"local_threshold": state.local_threshold, "threshold": state.global_threshold}
        if self.threshold_steps:
            own, passed = indices.size, int(sizes.sum())
            state.local_threshold = steered(state.local_threshold, own, k, _LOCAL_BAND, _LOCAL_FACTOR)
            state.global_threshold = steered(state.global_threshold, passed, k, _GLOBAL_BAND, _GLOBAL_FACTOR)
        state.step += 1
        return SparseSum(sum_.indices, sum_.values, selected, arrived.first_nonfinite, arrived.norms, facts)

    def _select(self, accumulator: Accumulator, state: OkTopkState, k: int) -> Indices:
        """What passes the local threshold."""
        if k == accumulator.num_elements:  # everything, zeros too
            return np.arange(k, dtype=np.int32)
        exact = self.threshold_steps == 0 or state.step % self.threshold_steps == 0
        if exact or not state.local_threshold:
            state.local_threshold = accumulator.kth_magnitude(k)
        return accumulator.at_least(state.local_threshold)

    def _prune_now(
        self, total: SparseVector, selection: Indices, state: OkTopkState, info: BucketInfo, k: int
    ) -> Synchronization[tuple[NDArray[np.int64], NDArray[np.int64], SparseVector]]:
        """As `_prune`, by a threshold of this step; the message is as long in every step of one k.

        It is: how many the rank selected, how many sums it has, its proposal for the regions (in some steps
        only), and the magnitudes of `told_orders`.
        """
        new_regions = state.step % self.region_steps == 0
        proposal = propose_regions(selection, info) if new_regions else state.bounds[:0]
        magnitudes, orders = np.abs(total.values), told_orders(k)
        falling = np.argsort(-magnitudes, kind="stable")
        told = np.zeros(orders.size, magnitudes.dtype)
        if len(total):
            told = magnitudes[falling[np.minimum(orders, len(total)) - 1]]
        numbers = np.array([selection.size, len(total)], np.int32)
        message = np.concatenate([numbers, proposal.astype(np.int32), told.view(np.int32)])
        gathered = (yield AllGather(message)).reshape(info.size, message.size)
        selected, lengths = gathered[:, :2].astype(np.int64).T
        if new_regions:
            state.bounds = gathered[:, 2 : 2 + proposal.size].mean(axis=0).astype(np.int64)
        theirs = np.ascontiguousarray(gathered[:, 2 + proposal.size :]).view(magnitudes.dtype)
        state.global_threshold, sizes = shares_of(theirs, lengths, k)
        kept = np.sort(falling[: sizes[info.rank]])
        return selected, sizes, SparseVector(total.indices[kept], total.values[kept])

    def _prune(
        self, total: SparseVector, selection: Indices, state: OkTopkState, info: BucketInfo, k: int
    ) -> Synchronization[tuple[NDArray[np.int64], NDArray[np.int64], SparseVector]]:
        """What passes the global threshold, and how many do on each rank; new regions when it is time.

        A message is: how many the rank selected, how many of its sums pass, then its proposal for the
        regions, then the magnitudes of all its sums; the last two in some steps only, the same on all
        ranks.
        """
        exact = state.step % self.threshold_steps == 0 or not state.global_threshold
        new_regions = state.step % self.region_steps == 0
        magnitudes = np.abs(total.values)
        keeps_all = k == info.num_elements
        passing = int((magnitudes >= state.global_threshold).sum())
        proposal = propose_regions(selection, info) if new_regions else state.bounds[:0]
        gathered = yield AllGather(
            np.concatenate(
                [
                    np.array([selection.size, len(total) if exact else passing], np.int32),
                    proposal.astype(np.int32),
                    magnitudes.view(np.int32) if exact else np.empty(0, np.int32),
                ]
            )
        )
        per_value, begin = magnitudes.itemsize // 4, 0
        selected, sizes = np.empty(info.size, np.int64), np.empty(info.size, np.int64)
        proposals, theirs = [], []
        for rank in range(info.size):
            selected[rank], sizes[rank] = gathered[begin : begin + 2]
            begin += 2
            proposals.append(gathered[begin : begin + proposal.size].astype(np.int64))
            begin += proposal.size
            if exact:
                length = int(sizes[rank]) * per_value
                theirs.append(gathered[begin : begin + length].copy().view(magnitudes.dtype))
                begin += length
        if exact:
            everyone = np.concatenate(theirs)
            state.global_threshold = 0.0
            if not keeps_all and everyone.size > k:
                state.global_threshold = float(np.partition(everyone, everyone.size - k)[everyone.size - k])
            sizes = np.array([(one >= state.global_threshold).sum() for one in theirs], np.int64)
        if new_regions:
            state.bounds = np.mean(proposals, axis=0).astype(np.int64)
        passes = magnitudes >= state.global_threshold
        return selected, sizes, SparseVector(total.indices[passes], total.values[passes])

    def _spread(
        self, kept: SparseVector, sizes: NDArray[np.int64], info: BucketInfo
    ) -> Synchronization[tuple[SparseVector, Values | None]]:
        """Equal parts of all ranks' sums, if one rank has far more than its share; else its own."""
        union = int(sizes.sum())
        if info.size * int(sizes.max()) <= _IMBALANCE * union:
            yield AllToAll((np.empty(0, np.int32),) * info.size)
            return kept, None
        first = int(sizes[: info.rank].sum())
        parts = []
        for rank in range(info.size):
            start, stop = (
                min(max(edge - first, 0), len(kept)) for edge in equal_part(union, info.size, rank)
            )
            parts.append(SparseVector(kept.indices[start:stop], kept.values[start:stop]))
        messages, error = cut_and_pack(parts, FoldReport(), info, self.wire)
        arrived = yield AllToAll(messages)
        sum_ = SparseSum.of(
            unpack_sum(np.concatenate(arrived), info.size, self.wire, info.num_elements, info.value_dtype)
        )
        return SparseVector(sum_.indices, sum_.values), error

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """All but the number of selected elements depends on the data."""
        most = min(info.num_elements, int(counts.sum()))
        words = [self.wire.message_words(count, info.num_elements, info.value_dtype) for count in (0, most)]
        told = 2 + (info.size - 1 if step % self.region_steps == 0 else 0)
        per_value = info.value_dtype.itemsize // 4
        magnitudes = (0, most * per_value)
        if self.threshold_steps == 0:
            magnitudes = (told_orders(self.num_selected(info, SparsifierState(step))).size * per_value,) * 2
        return (
            split_traffic(int(counts[info.rank]), info, self.wire),
            Traffic(AllGather, 4 * (told + magnitudes[0]), 4 * (told + magnitudes[1])),
            Traffic(AllToAll, 0, 4 * (info.size - 1) * words[1]),
            Traffic(AllGather, 4 * words[0], 4 * words[1]),
        )
