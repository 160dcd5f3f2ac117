"""The best of all ways to merge neighbours, found exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.cost import CostModel
from horovod_sparse.merging.bounds import Bounds
from horovod_sparse.merging.chain import SegmentTables, segment_tables
from horovod_sparse.merging.fixed import fixed, layerwise, single
from horovod_sparse.merging.greedy import omgs
from horovod_sparse.merging.plan import Plan
from horovod_sparse.merging.timeline import predict
from horovod_sparse.merging.workload import Workload, plan_of_segments

__all__ = ["best_segments", "optimal", "search_plan"]

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
    """What `optimal` does; `quick` gives up the proof for about a tenth of the time.

    Args:
        workload: as in `optimal`.
        cost: as in `optimal`.
        quick: keep a few beginnings at each boundary only. Near the best, and no worse than the simple
            strategies, all the same.
    """
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
