"""The best of all ways to merge neighbours, found exactly: tables of segments, bounds, and the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.planning.greedy import omgs
from horovod_sparse.planning.strategies import fixed, layerwise, single
from horovod_sparse.planning.timeline import predict
from horovod_sparse.planning.workload import Workload, plan_of_segments
from horovod_sparse.plans.plan import MAX_BUCKET_ELEMENTS, Plan, same_kind

Array = NDArray[np.float64]


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

    computation: Array
    network: Array
    path: Array
    selection: Array
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
) -> tuple[Array, Array, tuple[NDArray[np.int64], Array, Array], float]:
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


_KEPT = 16


class Bounds:
    """Lower bounds of a step's end, for any beginning of a plan, and a good plan found on the way.

    A step ends when the longest path through its two queues does: path q computes every segment up to
    the one that holds parameter q, and communicates from that one on. With weights p_q that sum to 1,
    the end is no earlier than the weighted mean of the paths,

    ``sum over segments (i, j] of Pr(q >= i) * computation + Pr(q < j) * network``,

    and the plan that makes this least is a shortest path over boundaries (path -1 communicates only).
    The weights are improved
    step by step: paths that are long under the present least plan gain weight (exponentiated
    subgradient); the plans met on the way are good ones. For a beginning that leaves (x, y) at boundary j
    the same weights give ``Pr(q >= j) x + Pr(q < j) y + rest[j]``.

    Attributes:
        segments: the best plan met.
        seconds: its time.
        first_start: for every boundary, where the longest segment that may end there in a better plan
            than `segments` begins.
    """

    def __init__(self, tables: SegmentTables, num_iterations: int = 160) -> None:
        self._tables, m = tables, tables.num_sparse
        # shortest paths need numbers where there is no segment
        large = 4.0 * float(np.max(tables.computation[0, m]) + np.sum(np.diagonal(tables.network, 1)) + 1.0)
        self._computation = np.where(np.isfinite(tables.computation), tables.computation, large)
        self._network = np.where(np.isfinite(tables.network), tables.network, large)
        self.segments: list[int] = [m]
        self.seconds = tables.seconds([m])
        found: list[tuple[float, Array, Array]] = []
        weights = np.zeros(m + 1)
        for share in np.linspace(0.0, 1.0, 5):  # all communication, all computation, and between
            weights[0], weights[-1] = 1.0 - share, share
            self._try(found, weights)
        simple = found[:]
        weights = np.full(m + 1, 1.0 / m)
        weights[0] = 0.0
        for _ in range(num_iterations):
            paths = self._try(found, weights)
            excess = paths - found[-1][0]
            least = max(bound for bound, _, _ in found)
            if self.seconds - least <= 1e-12 * self.seconds:
                break
            step = (self.seconds - least) / max(float(np.sum(weights * excess**2)), 1e-300)
            step = min(step, 5.0 / max(float(np.max(np.abs(excess))), 1e-300))
            weights = weights * np.exp(step * excess)
            weights /= weights.sum()
        # the best ones, and those that say most about beginnings far from the best plan's
        kept = sorted(found, key=lambda item: -item[0])[:_KEPT] + simple
        self._later = np.stack([later for _, later, _ in kept])
        self._rest = np.stack([rest for _, _, rest in kept])
        self.first_start = self._first_start()

    def _try(self, found: list[tuple[float, Array, Array]], weights: Array) -> Array:
        """The bound of some weights, remembered; returns the paths' lengths under its least plan."""
        m = self._tables.num_sparse
        sooner = np.cumsum(weights)  # Pr(q < j)
        later = 1.0 - sooner
        spent = self._spent(later)
        rest, follows = np.zeros(m + 1), np.zeros(m + 1, np.int64)
        # what follows the last sparse parameter: a path that has switched pays network, and all have
        rest[m] = self._tables.tail[0]
        for start in range(m - 1, -1, -1):
            sums = spent[start, start:] + rest[start + 1 :]
            best = int(np.argmin(sums))
            rest[start], follows[start] = sums[best], start + 1 + best
        segments = [int(follows[0])]
        while segments[-1] < m:
            segments.append(int(follows[segments[-1]]))
        if (seconds := self._tables.seconds(segments)) < self.seconds:
            self.segments, self.seconds = segments, seconds
        found.append((float(rest[0]), later, rest))
        ends = np.array([0, *segments])
        network = self._network[ends[:-1], ends[1:]]
        paths = np.cumsum(self._computation[ends[:-1], ends[1:]]) + np.cumsum(network[::-1])[::-1]
        through = np.repeat(paths, np.diff(ends))
        return np.concatenate([[network.sum()], through]) + self._tables.tail[0]

    def _spent(self, later: Array) -> Array:
        """Weighted time of segment (i, j] at [i, j - 1]."""
        m = self._tables.num_sparse
        return later[:m, None] * self._computation[:m, 1:] + (1.0 - later[1:]) * self._network[:m, 1:]

    def _first_start(self) -> NDArray[np.int64]:
        m = self._tables.num_sparse
        possible = np.triu(np.ones((m, m), bool))
        for later, rest in zip(self._later[:2], self._rest[:2], strict=True):
            spent = self._spent(later)
            before = np.zeros(m + 1)
            for stop in range(1, m + 1):
                before[stop] = np.min(before[:stop] + spent[:stop, stop - 1])
            possible &= before[:m, None] + spent + rest[1:] < self.seconds
        first = np.concatenate([[0], np.argmax(possible, axis=0)])
        first[1:][~possible.any(axis=0)] = np.arange(m)[~possible.any(axis=0)]
        return first.astype(np.int64)

    def least(self, boundary: int, computation: Array, communication: Array, *, rough: bool = False) -> Array:
        """The earliest end that each beginning at a boundary can lead to."""
        rows = slice(0, 2) if rough else slice(None)
        later = self._later[rows, boundary, None]
        bounds: Array = np.max(
            later * computation + (1.0 - later) * communication + self._rest[rows, boundary, None], axis=0
        )
        return bounds


_BEAM = 24


def optimal(workload: Workload, cost: CostModel) -> Plan:
    """The plan of the shortest step among all 2^(m-1) that merge runs of m neighbours.

    Dynamic programming over the ends of buckets. What a beginning of a plan leaves behind is only the
    pair (end of computation, end of communication), and no later time falls when either rises; so of
    all beginnings up to a parameter, those that are beaten in both can be dropped (`best_segments`).

    Exact where all sparse parameters are of one kind, none is dense, and buckets are not fused on
    the network. Otherwise the search uses an approximation of the step (see `segment_tables`), and what
    it finds is compared, by `predict`, with `omgs`, `layerwise`, `single` and `fixed`; the
    best is returned, so it is never worse than those.

    Args:
        workload: parameters and their backward times.
        cost: of selection and communication.

    Source: beyond OMGS-SGD, whose Algorithm 1 is greedy.

    Example:
        >>> from horovod_sparse.cost import AffineTime
        >>> from horovod_sparse.merging import ParameterFacts
        >>> facts = tuple(ParameterFacts(name, 1000) for name in "abc")
        >>> cost = CostModel(AffineTime(), AffineTime(0.5, 0.0005))
        >>> optimal(Workload(facts, (1.6, 0.1, 0.1)), cost).buckets  # c and b are sent while a comes
        (('c', 'b'), ('a',))
    """
    return search_plan(workload, cost)


def search_plan(workload: Workload, cost: CostModel, *, quick: bool = False) -> Plan:
    """What `optimal` does; `quick` gives up the proof for about a tenth of the time."""
    if not workload.sparse:
        return Plan((), workload.dense_names)
    greedy = omgs(workload, cost)
    candidates = [greedy, layerwise(workload, cost), single(workload, cost)]
    candidates.append(fixed(num_elements=8192)(workload, cost))
    variants: tuple[bool, ...] = (True,)
    if workload.dense and cost.fuse_dense:
        variants = (False,) if quick else (True, False)
    for dense_startup in variants:
        tables = segment_tables(workload, cost, dense_startup=dense_startup)
        candidates.append(plan_of_segments(workload, best_segments(tables, quick=quick)))
    # the found ones last: of equal times, theirs
    return min(reversed(candidates), key=lambda plan: predict(workload, plan, cost).iteration_seconds)


def best_segments(tables: SegmentTables, *, quick: bool = False) -> list[int]:
    """Where segments should end, positions in backward order; the last one is their number.

    Lower bounds and a good plan come first (`Bounds`). A run over the boundaries that keeps only a few
    beginnings at each finds a better plan; a second run keeps all that nothing beats, less those that
    provably lead to nothing better than the best plan known. `quick` leaves that one out.
    """
    bounds = Bounds(tables, num_iterations=20 if quick else 160)
    segments, upper = bounds.segments, bounds.seconds
    for most in (_BEAM,) if quick else (_BEAM, None):
        found, seconds = _search(tables, bounds, upper, most)
        if seconds < upper:
            segments, upper = found, seconds
    return segments


def _search(tables: SegmentTables, bounds: Bounds, upper: float, most: int | None) -> tuple[list[int], float]:
    """The best plan better than `upper`, and its time; `most` limits the beginnings kept at a boundary."""
    m = tables.num_sparse
    states: NDArray[np.float64] = np.zeros((2, 64))  # end of computation, end of communication
    origin: NDArray[np.int64] = np.zeros((3, 64), np.int64)  # boundary, the state before, number of buckets
    offsets = [0, 1]  # of every boundary's states
    # what is only as good as the known plan is not looked for; the margin is for rounding
    limit = upper * (1.0 - 1e-12)
    for stop in range(1, m + 1):
        begin, end = offsets[bounds.first_start[stop]], offsets[-1]
        at = origin[0, begin:end]
        computation = states[0, begin:end] + tables.computation[at, stop]
        communication = np.maximum(
            states[1, begin:end] + tables.network[at, stop], states[0, begin:end] + tables.path[at, stop]
        )
        # most lead to nothing better: they need not be sorted. Whatever one of them beats goes with it,
        # for bounds rise with both ends
        hopeful = np.flatnonzero(bounds.least(stop, computation, communication, rough=True) < limit)
        front = hopeful[_front(computation[hopeful], communication[hopeful], origin[2, begin:end][hopeful])]
        least = bounds.least(stop, computation[front], communication[front])
        if most is not None and front.size > most:
            chosen = np.sort(np.argpartition(least, most)[:most])
            front, least = front[chosen], least[chosen]
        front = front[least < limit]
        new = slice(end, end + front.size)
        while states.shape[1] < new.stop:  # doubled, so that growing costs little in all
            states = np.hstack([states, np.empty_like(states)])
            origin = np.hstack([origin, np.empty_like(origin)])
        states[:, new] = computation[front], communication[front]
        origin[:, new] = np.full(front.size, stop), front + begin, origin[2, begin:end][front] + 1
        offsets.append(new.stop)
    if offsets[m] == offsets[m + 1]:
        return [], np.inf
    last = states[:, offsets[m] : offsets[m + 1]]
    done = np.maximum(last[1] + tables.tail[0], last[0] + tables.tail[1])
    state, segments = offsets[m] + int(np.argmin(done)), []
    while state:
        segments.append(int(origin[0, state]))
        state = int(origin[1, state])
    return segments[::-1], float(done.min())


def _front(
    computation: NDArray[np.float64], communication: NDArray[np.float64], num_buckets: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Positions of what is not beaten in both ends, by rising computation; of equals, the fewest buckets."""
    # one key first, equals kept: few are left for the three
    order = np.argsort(computation)
    order = order[communication[order] <= _best_before(communication[order])]
    order = order[np.lexsort((num_buckets[order], communication[order], computation[order]))]
    kept: NDArray[np.int64] = order[communication[order] < _best_before(communication[order])]
    return kept


def _best_before(ends: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least of all before each."""
    return np.concatenate([[np.inf], np.minimum.accumulate(ends)[:-1]])
