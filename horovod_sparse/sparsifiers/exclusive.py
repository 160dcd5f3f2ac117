"""What MiCRO and ExDyna share: exclusive windows, a steered threshold, two rounds."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from horovod_sparse.arrays.protocol import Accumulator, Indices
from horovod_sparse.collectives import ADDED, AllGather, Request, Synchronization
from horovod_sparse.errors import StateMismatchError
from horovod_sparse.sparsifiers.base import (
    BucketInfo,
    SparseSum,
    Sparsifier,
    SparsifierState,
    Traffic,
    exchange_selections,
)
from horovod_sparse.sparsifiers.capacity import Capacity
from horovod_sparse.sparsifiers.rounds.regions import Window
from horovod_sparse.sparsifiers.rounds.shared import sum_at, sum_rounds, sum_traffic
from horovod_sparse.thresholds import ThresholdRule, ThresholdState, threshold_rule


@dataclass
class ExclusiveState(SparsifierState):
    """State of an exclusive threshold sparsifier.

    Attributes:
        step: synchronizations done.
        threshold: of the threshold rule.
        selections: room in messages of selected indices.
        unions: room for values at all of them.
    """

    threshold: ThresholdState = field(default_factory=ThresholdState)
    selections: Capacity = field(default_factory=Capacity, metadata=ADDED)
    unions: Capacity = field(default_factory=Capacity, metadata=ADDED)

    @property
    def turn(self) -> int:
        """How often ranks have changed windows: in every step in which something was to be sent."""
        return self.step - self.threshold.paused


@dataclass(frozen=True, kw_only=True)
class ExclusiveThreshold(Sparsifier):
    """Rank i selects in a window that no other rank searches in this step.

    A subclass says which window. Round one allgathers the selected indices; windows are disjoint, so
    they are the union. Round two allreduces everyone's accumulator at the union, and everyone clears it.
    """

    density_scope: ClassVar[Literal["per rank", "global"]] = "global"

    threshold: str | ThresholdRule = "sketch"

    def __post_init__(self) -> None:
        super().__post_init__()
        threshold_rule(self.threshold)

    def init(self, info: BucketInfo) -> ExclusiveState:
        """Step 0, no threshold yet."""
        return ExclusiveState()

    def rescale(self, state: ExclusiveState, factor: float) -> None:
        """The threshold follows the residual; see `Sparsifier.rescale`."""
        state.threshold.threshold *= factor
        state.threshold.scale *= factor

    @abc.abstractmethod
    def window(self, state: Any, info: BucketInfo) -> Window:
        """(start, stop) of what this rank searches in this step."""

    def observe(self, state: Any, info: BucketInfo, counts: np.ndarray, union: Indices) -> None:
        """Learns from what all ranks selected (moves partitions, for one). Nothing here.

        Args:
            state: before its step is counted; changed in place.
            info: the facts of the bucket.
            counts: int [P], elements selected by every rank.
            union: the selections of all ranks, one behind the other.
        """

    def synchronize(
        self, accumulator: Accumulator, state: ExclusiveState, info: BucketInfo
    ) -> Synchronization[SparseSum]:
        """An allgather of indices, an allreduce of values; see `Sparsifier.synchronize`."""
        rule = threshold_rule(self.threshold)
        num_selected = self.num_selected(info, state)
        threshold = rule.find(accumulator, num_selected, state.threshold)
        start, stop = self.window(state, info)
        # a rule that does not say so sends all hits, whatever length that makes
        bounded = getattr(rule, "bounded", False) and self.capacity == "measured"
        bounded = bounded and num_selected < info.num_elements
        rooms, overflow = (0, 0), 0
        if bounded:
            rooms = (
                state.selections.room(num_selected, info.num_elements),
                state.unions.room(num_selected, info.num_elements),
            )
        if num_selected < info.num_elements:
            selection = accumulator.at_least(threshold, start, stop)
            num_hits = selection.size
            wanted = rule.wanted(num_hits, num_selected, state.threshold)
            if rooms[0] and wanted > rooms[0]:
                wanted, overflow = rooms[0], wanted - rooms[0]
            if wanted != num_hits:
                selection = accumulator.largest(min(wanted, stop - start), start, stop)
            if wanted > num_hits:  # there may be nothing but zeros below the threshold
                selection = selection[accumulator.take(selection) != 0]
        else:  # everything, zeros too: where this rank holds 0 others may not
            selection = np.arange(start, stop, dtype=np.int32)
        wire, union_wire = (self.wire_with_room(room) for room in rooms)
        gathered = yield from exchange_selections(accumulator, selection, None, info, wire)
        _check_exclusive(gathered.indices, gathered.counts, info)
        # the union is known to all by now: nothing of it has to wait where there is too little room
        sum_ = yield from sum_at(
            accumulator, gathered.indices, gathered.counts, info, union_wire, ask_health=False
        )
        sum_.first_nonfinite, sum_.norms = gathered.first_nonfinite, gathered.norms
        union = int(sum_.counts.sum())
        sum_.facts.update(  # imbalance: f(t) of ExDyna, Eq. (5); density error: Eq. (6)
            threshold=threshold,
            imbalance=info.size * int(sum_.counts.max()) / union if union else 1.0,
            density_error=abs(num_selected - union) / info.num_elements,
        )
        if rooms[0]:
            sum_.facts["overflow"] = float(overflow)
        if bounded:
            sum_.rooms = rooms
            state.selections = state.selections.learned(sum_.counts, num_selected)
            state.unions = state.unions.learned(np.array([union]), num_selected)
        rule.steer(gathered.indices.size, num_selected, state.threshold)
        self.observe(state, info, sum_.counts, gathered.indices)
        state.step += 1
        state.threshold.share = _share(gathered.indices, self.window(state, info))
        return sum_

    def rounds(self, size: int) -> tuple[type[Request], ...]:
        """An allgather, and the rounds of a sum at known indices."""
        return (AllGather, *sum_rounds(self.wire))

    def traffic(
        self, info: BucketInfo, counts: np.ndarray, step: int = 0, rooms: tuple[int, ...] = ()
    ) -> tuple[Traffic, ...]:
        """This rank's indices; the union's values."""
        wire, union_wire = (self.wire_with_room(room) for room in rooms or (0, 0))
        num_bytes = wire.message_bytes(int(counts[info.rank]), info.num_elements, None)
        return (
            Traffic(AllGather, num_bytes),
            *sum_traffic(int(counts.sum()), info, union_wire, ask_health=False),
        )


def _check_exclusive(union: Indices, counts: np.ndarray, info: BucketInfo) -> None:
    """Refuses selections of which two hold the same element: its sum would be applied twice. O(k).

    All ranks see the same selections, so they all raise, or none.

    Args:
        union: the selections of all ranks, one behind the other.
        counts: int [P], elements selected by every rank.
        info: the facts of the bucket.

    Raises:
        StateMismatchError: naming two ranks.
    """
    ends = np.cumsum(counts)
    rising = union[1:] > union[:-1]
    rising[ends[(ends > 0) & (ends < union.size)] - 1] = True  # from one rank to the next
    ranks = np.flatnonzero(counts)
    first, last = union[(ends - counts)[ranks]], union[ends[ranks] - 1]
    order = np.argsort(first, kind="stable")
    meeting = np.flatnonzero(last[order][:-1] >= first[order][1:])
    if rising.all() and not meeting.size:
        return
    where = "a rank has selected an element twice"
    if meeting.size:
        one, other = sorted(ranks[order[[meeting[0], meeting[0] + 1]]].tolist())
        where = f"ranks {one} and {other} have selected in one another's parts"
    raise StateMismatchError(
        f"{info.name}: {where} in the same step, of which exclusive parts are to have none in common: the "
        "states of the ranks' sparsifiers differ. No rank applied this step; load a checkpoint of one step "
        "on all ranks"
    )


def _share(union: Indices, window: Window) -> float:
    """Part of a union that lies in a window; -1 for an empty union."""
    if union.size == 0:
        return -1.0
    start, stop = window
    return float(np.count_nonzero((union >= start) & (union < stop)) / union.size)
