"""What merging a run of neighbours costs, for every run: tables that the exact search stands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.cost import CostModel
from horovod_sparse.merging.plan import MAX_BUCKET_ELEMENTS, same_kind
from horovod_sparse.merging.workload import Workload

__all__ = ["SegmentTables", "segment_tables"]

Table = NDArray[np.float64]


@dataclass(frozen=True)
class SegmentTables:
    """A segment (i, j] of the sparse parameters in backward order, as what it does to the two queues.

    With computation done at time x and the network free at time y before the segment, after it

    ``x' = x + computation[i, j]`` and ``y' = max(y + network[i, j], x + path[i, j])``.

    Attributes:
        computation: backward and selection.
        network: communication of all its messages.
        path: the longest way through the segment from the start of its backward to the end of its
            communication.
        selection: the part of `computation` that merging can change.
        tail: what comes after the last sparse parameter (dense ones), as (network, path).
    """

    computation: Table
    network: Table
    path: Table
    selection: Table
    tail: tuple[float, float]

    @property
    def num_sparse(self) -> int:
        """Parameters that can be merged."""
        return self.computation.shape[0] - 1

    def seconds(self, segments: Sequence[int]) -> float:
        """When everything is done if segments end at these positions, and backward begins at 0."""
        x = y = 0.0
        start = 0
        for stop in segments:
            y = max(y + self.network[start, stop], x + self.path[start, stop])
            x += self.computation[start, stop]
            start = stop
        return float(max(y + self.tail[0], x + self.tail[1]))


def segment_tables(workload: Workload, cost: CostModel, *, dense_startup: bool = True) -> SegmentTables:
    """Tables of all segments of a step.

    Exact for parameters of one kind. Where a segment mixes kinds, the buckets of all kinds count as
    complete at its end, which is a little late for some. Dense parameters go one by one.

    Args:
        workload: the step.
        cost: of its parts.
        dense_startup: False lets dense parameters save their start-up time, as if all were fused.

    Returns:
        Tables of (m + 1) x (m + 1) numbers for m sparse parameters; infinite where j <= i.
    """
    ready, elements, dense, all_ready = _positions(workload, cost, dense_startup)
    m = elements.shape[1]
    shape = (m + 1, m + 1)
    computation, network, path = (np.full(shape, np.inf) for _ in range(3))
    selection = np.full(shape, np.inf)
    totals = np.concatenate([np.zeros((len(elements), 1)), np.cumsum(elements, axis=1)], axis=1)
    dense_at, dense_ready, dense_seconds = dense
    dense_before = np.concatenate([[0.0], np.cumsum(dense_seconds)])
    # number of dense parameters whose gradient comes before that of sparse parameter j
    num_before = np.searchsorted(dense_at, np.arange(m + 1), side="left")
    for i in range(m):
        stops = np.arange(i + 1, m + 1)
        elapsed = ready[stops] - ready[i]
        # dense ones first: each is ready with its gradient, and none waits for this segment's buckets
        first, last = num_before[i], num_before[stops]
        sent = dense_before[last] - dense_before[first]
        longest = np.concatenate(
            [[-np.inf], np.maximum.accumulate(dense_ready - ready[i] - dense_before[:-1])]
        )
        if first:  # of those within the segment only
            inside = (dense_ready - ready[i] - dense_before[:-1])[first:]
            longest = np.concatenate([np.full(first + 1, -np.inf), np.maximum.accumulate(inside)])
        way, selecting = longest[last] + dense_before[last], np.zeros(len(stops))
        for kind in totals:
            amount = kind[stops] - kind[i]
            selecting = selecting + cost.selection.seconds(amount)
            message = np.where(amount > MAX_BUCKET_ELEMENTS, np.inf, cost.communication.seconds(amount))
            way = np.where(amount > 0, np.maximum(way, elapsed + selecting) + message, way)
            sent = sent + message
        selection[i, stops] = selecting
        computation[i, stops] = elapsed + selecting
        network[i, stops], path[i, stops] = sent, way
    first = int(num_before[m])
    tail_network = float(dense_before[-1] - dense_before[first])
    ways = dense_ready[first:] - ready[m] + dense_before[-1] - dense_before[first:-1]
    tail_path = max([all_ready - float(ready[m]), *ways.tolist()])
    return SegmentTables(computation, network, path, selection, (tail_network, tail_path))


def _positions(
    workload: Workload, cost: CostModel, dense_startup: bool
) -> tuple[Table, Table, tuple[NDArray[np.int64], Table, Table], float]:
    """Time until every sparse gradient (from 0 on), elements by kind, the dense ones, and until the end."""
    kinds: dict[tuple[str, str, int, float], int] = {}
    ready, clock = [0.0], 0.0
    sparse: list[tuple[int, int]] = []
    dense: list[tuple[int, float, float]] = []
    for parameter, seconds in zip(workload.backward, reversed(workload.backward_seconds), strict=True):
        clock += seconds
        if parameter.name in workload.dense:
            took = float(cost.dense.seconds(parameter.num_bytes))
            took -= 0.0 if dense_startup else cost.dense.fixed_seconds
            clock += float(cost.dense_work.seconds(parameter.num_elements))
            dense.append((len(sparse), clock, took))
        else:
            kind = kinds.setdefault(same_kind(parameter), len(kinds))
            sparse.append((kind, parameter.num_elements))
            ready.append(clock)
    elements = np.zeros((max(1, len(kinds)), len(sparse)))
    for position, (kind, number) in enumerate(sparse):
        elements[kind, position] = number
    columns = np.array(dense, np.float64).reshape(-1, 3).T
    return np.array(ready), elements, (columns[0].astype(np.int64), columns[1], columns[2]), clock
