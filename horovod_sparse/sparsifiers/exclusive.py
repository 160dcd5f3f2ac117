"""The base of MiCRO and ExDyna: exclusive windows, a steered threshold, two rounds."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from horovod_sparse.arrays import Accumulator, Indices
from horovod_sparse.collectives import AllGather, Synchronization
from horovod_sparse.errors import StateMismatchError, UnknownNameError
from horovod_sparse.sparsifiers import BucketInfo, SparseSum, Sparsifier, SparsifierState, Traffic
from horovod_sparse.sparsifiers.base import exchange_selections
from horovod_sparse.sparsifiers.rounds.shared import sum_at, sum_traffic
from horovod_sparse.sparsifiers.rounds.sparse_vectors import Window
from horovod_sparse.thresholds import RULES, ThresholdRule, ThresholdState


@dataclass(frozen=True)
class ExclusiveState(SparsifierState):
    """State of an exclusive sparsifier: the step, and the state of its threshold."""

    threshold: ThresholdState = field(default_factory=ThresholdState)

    @property
    def turn(self) -> int:
        """Returns how often the ranks have exchanged their windows: once in each step that sent something."""
        return self.step - self.threshold.paused


@dataclass(frozen=True, kw_only=True)
class ExclusiveThreshold(Sparsifier):
    """Base of algorithms in which each rank selects in a window of the bucket that no other rank searches.

    A subclass chooses the windows. Round one allgathers the selected indices; windows are disjoint, so
    they are the union. Round two allreduces everyone's accumulator at the union, and everyone clears it.
    """

    density_scope: ClassVar[Literal["per rank", "global"]] = "global"

    threshold: str = "sketch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold not in RULES:
            raise UnknownNameError("threshold", str(self.threshold), RULES)

    def init(self, info: BucketInfo) -> ExclusiveState:
        return ExclusiveState()

    @abc.abstractmethod
    def window(self, state: Any, info: BucketInfo) -> Window:
        """Returns (start, stop) of the window that this rank searches in this step."""

    def learn_union(self, state: Any, info: BucketInfo, counts: np.ndarray, union: Indices) -> Any:
        """Returns the next step's state, given how many elements each rank selected, and their indices."""
        return state

    def synchronize(
        self, accumulator: Accumulator, state: ExclusiveState, info: BucketInfo
    ) -> Synchronization[tuple[SparseSum, SparsifierState]]:
        rule, k, n = RULES[self.threshold], self.num_selected(info, state.step), info.num_elements
        found, window = rule.find(accumulator, k, state.threshold), self.window(state, info)
        if k < n:
            selection = _select(accumulator, rule, k, window, found)
        else:  # everything, zeros too: where this rank holds 0 others may not
            selection = np.arange(*window, dtype=np.int32)
        gathered = yield from exchange_selections(accumulator, selection, None, info, self.wire)
        _check_exclusive(gathered.indices, gathered.counts, info)
        sum_ = yield from sum_at(
            accumulator, gathered.indices, gathered.counts, info, self.wire, with_notes=False
        )
        sum_.notes = gathered.notes
        union = int(sum_.counts.sum())
        sum_.facts.update(  # imbalance: f(t) of ExDyna, Eq. (5); density error: Eq. (6)
            threshold=found.threshold if k < n else 0.0,
            imbalance=info.size * int(sum_.counts.max()) / union if union else 1.0,
            density_error=abs(k - union) / n,
        )
        after = replace(state, threshold=rule.steer(union, k, found))
        after = self.learn_union(after, info, sum_.counts, gathered.indices)
        start, stop = self.window(replace(after, step=after.step + 1), info)  # the next step's window
        here = np.count_nonzero((gathered.indices >= start) & (gathered.indices < stop))
        share = float(here / union) if union else -1.0
        return sum_, replace(after, threshold=replace(after.threshold, share=share))

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        num_bytes = self.wire.message_bytes(int(counts[info.rank]), info.num_elements, None)
        values = sum_traffic(int(counts.sum()), info, self.wire, with_notes=False)
        return (Traffic(AllGather, num_bytes), *values)


def _select(
    accumulator: Accumulator, rule: ThresholdRule, k: int, window: Window, state: ThresholdState
) -> Indices:
    """Returns the window's indices that reach the threshold, or its largest if `rule` wants fewer or more."""
    start, stop = window
    selection = accumulator.at_least(state.threshold, start, stop)
    num_hits = selection.size
    wanted = rule.num_to_send(num_hits, k, state)
    if wanted != num_hits:
        selection = accumulator.largest(min(wanted, stop - start), start, stop)
    if wanted > num_hits:  # there may be nothing but zeros below the threshold
        selection = selection[accumulator.take(selection) != 0]
    return selection


def _check_exclusive(union: Indices, counts: np.ndarray, info: BucketInfo) -> None:
    """Raises on all ranks if two ranks selected the same element, whose value would be added twice."""
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
        f"{info.name}: {where} in the same step, though the ranks' parts must not overlap: the "
        "states of the ranks' sparsifiers differ. No rank applied this step; load a checkpoint of one step "
        "on all ranks"
    )
