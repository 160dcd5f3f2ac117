"""What MiCRO and ExDyna share: exclusive windows, a steered threshold, two rounds."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from horovod_sparse.arrays.protocol import Accumulator, Indices, Values
from horovod_sparse.collectives import AllGather, AllReduce, Request, Synchronization
from horovod_sparse.sparsifiers.base import (
    BucketInfo,
    SparseSum,
    Sparsifier,
    SparsifierState,
    Traffic,
    exchange_selections,
    headers,
)
from horovod_sparse.thresholds import ThresholdRule, ThresholdState, threshold_rule
from horovod_sparse.wire import message_words

__all__ = ["ExclusiveState", "ExclusiveThreshold", "Window"]

Window: TypeAlias = tuple[int, int]


@dataclass
class ExclusiveState(SparsifierState):
    """State of an exclusive threshold sparsifier.

    Attributes:
        step: synchronizations done.
        threshold: of the threshold rule.
    """

    threshold: ThresholdState = field(default_factory=ThresholdState)


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
        if num_selected < info.num_elements:
            selection = accumulator.at_least(threshold, start, stop)
        else:  # everything, zeros too: where this rank holds 0 others may not
            selection = np.arange(start, stop, dtype=np.int32)
        messages = yield from exchange_selections(accumulator, selection, None, info, self.quantum)

        union = np.concatenate([message.indices for message in messages])
        values = accumulator.take(union)
        accumulator.clear(union)
        summed = yield AllReduce(_padded(values, self.quantum))

        sum_ = SparseSum(union, summed[: union.size], **headers(messages))
        sum_.facts.update(self._facts(threshold, num_selected, sum_.counts, info))
        rule.steer(union.size, num_selected, state.threshold)
        self.observe(state, info, sum_.counts, union)
        state.step += 1
        return sum_

    def rounds(self, size: int) -> tuple[type[Request], ...]:
        """An allgather and an allreduce."""
        return (AllGather, AllReduce)

    def traffic(self, info: BucketInfo, counts: np.ndarray) -> tuple[Traffic, ...]:
        """This rank's indices; the union's values."""
        words = message_words(int(counts[info.rank]), 0, self.quantum)
        union = -(-int(counts.sum()) // self.quantum) * self.quantum
        return (Traffic(AllGather, 4 * words), Traffic(AllReduce, union * info.value_dtype.itemsize))

    @staticmethod
    def _facts(threshold: float, num_selected: int, counts: np.ndarray, info: BucketInfo) -> dict[str, float]:
        """Threshold; f(t) and the density error of ExDyna, Eqs. (5) and (6)."""
        union = int(counts.sum())
        return {
            "threshold": threshold,
            "imbalance": info.size * int(counts.max()) / union if union else 1.0,
            "density_error": abs(num_selected - union) / info.num_elements,
        }


def _padded(values: Values, quantum: int) -> Values:
    """Values with zeros behind them up to a multiple of the quantum."""
    missing = -values.size % quantum
    return values if missing == 0 else np.concatenate([values, np.zeros(missing, values.dtype)])
