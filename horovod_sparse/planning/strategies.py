"""Merging strategies: by size, the greedy one of OMGS-SGD, and the optimum by dynamic programming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError
from horovod_sparse.planning.model import CostModel, Workload, plan_of_segments, predict
from horovod_sparse.plans import MAX_BUCKET_ELEMENTS, Plan, fixed_bytes, fixed_elements

Strategy: TypeAlias = Callable[[Workload, CostModel], Plan]


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Merges parameters into buckets up to a size: ``merging=fixed(num_elements=8192)`` or ``bytes=``.

    Args:
        num_elements: a bucket is closed once it holds so many elements (MGS-SGD; the paper has 8192).
        bytes: a bucket is closed before it would exceed so many bytes of gradient, as Horovod's buffer.
    """

    num_elements: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        given = {"num_elements": self.num_elements, "bytes": self.bytes}
        if sum(value is not None for value in given.values()) != 1:
            raise ArgumentError("merging=fixed", given, "either num_elements or bytes")
        for name, value in given.items():
            if value is not None:
                check_count(name, value)

    def __call__(self, workload: Workload, cost: CostModel | None = None) -> Plan:
        if self.bytes is not None:
            plan = fixed_bytes(workload.sparse, self.bytes)
        else:
            plan = fixed_elements(workload.sparse, self.num_elements or 1)
        return Plan(plan.buckets, workload.dense_names)


fixed = Fixed
#: a bucket for every parameter (LAGS-SGD)
layerwise = Fixed(num_elements=1)
#: one bucket of everything, or as few as kinds and int32 allow (TopK-SGD)
single = Fixed(num_elements=MAX_BUCKET_ELEMENTS)

Times = NDArray[np.float64]


def omgs(workload: Workload, cost: CostModel) -> Plan:
    """Returns OMGS-SGD's plan (Algorithm 1): from layer L down to 2, merges l into l - 1 if that pays.

    ``Q3: u + t_s(d_l) + t_s(d_{l-1}) < tau_c(l) + t_c(d_l)`` and
    ``Q5: tau_c(l) + alpha > u + t_s(d_l + d_{l-1})`` with ``u = tau_b(l) + t_b(l) + t_b(l-1)``, where t_s is
    `cost.selection`, t_c `cost.communication`, alpha its `fixed_seconds`; all times are computed anew after
    each merge. It is optimal for one decision at a time, and not for all of them together: see `optimal`.

    That stands on the paper's selection, which a merge never makes shorter. Where a selection costs
    something however small its bucket (``t_s = a + b n``, what is measured here), a merge may pay although
    the network is idle. There the gain itself is tested: l is merged if the step ends earlier then, and at
    last the plan is compared with no merging and with one bucket. So by `predict` it is never worse than
    either.

    Source: OMGS-SGD, section IV. Departures: a merged layer costs nothing, as Eq. (13) says; lines 18
    and 22 as printed would charge it alpha again, and line 16 log 0. The public program always merges
    the last two layers, and never l = 2 by test (its loop is off by one); this does neither.
    """
    elements, backward = _sparse_layers(workload, cost)
    num_layers = elements.size
    by_gain = cost.selection.fixed_seconds > 0.0
    merged = np.zeros(num_layers, bool)
    # layer l of the paper has index l - 1
    for layer in range(num_layers - 1, 0, -1):
        if (_merged_ends_earlier if by_gain else _merging_pays)(layer, elements, backward, cost):
            merged[layer] = True
            elements, backward = _merge(layer, elements, backward)
    # in backward order, a segment ends after every layer that was not merged into the next
    ends = [num_layers - layer for layer in range(num_layers - 1, -1, -1) if not merged[layer]]
    plan = plan_of_segments(workload, ends)
    if not by_gain:
        return plan
    others = (layerwise(workload, cost), single(workload, cost))
    return min(plan, *others, key=lambda one: predict(workload, one, cost).iteration_seconds)


def _merging_pays(layer: int, elements: Times, backward: Times, cost: CostModel) -> bool:
    """True if merging layer l into l - 1 shortens the step: OMGS-SGD's conditions Q3 and Q5."""
    start_backward, start_communication, _ = _timeline(elements, backward, cost)
    here, below = elements[layer], elements[layer - 1]
    ready = start_backward[layer] + backward[layer] + backward[layer - 1]
    apart = ready + cost.selection.seconds(here) + cost.selection.seconds(below)
    together = ready + cost.selection.seconds(here + below)
    busy_until = start_communication[layer] + cost.communication.seconds(here)
    alpha = cost.communication.fixed_seconds
    return bool(apart < busy_until and start_communication[layer] + alpha > together)


def _merged_ends_earlier(layer: int, elements: Times, backward: Times, cost: CostModel) -> bool:
    return _timeline(*_merge(layer, elements, backward), cost)[2] < _timeline(elements, backward, cost)[2]


def _merge(layer: int, elements: Times, backward: Times) -> tuple[Times, Times]:
    elements, backward = elements.copy(), backward.copy()
    for amounts in (elements, backward):
        amounts[layer - 1] += amounts[layer]
        amounts[layer] = 0.0
    return elements, backward


def _sparse_layers(workload: Workload, cost: CostModel) -> tuple[Times, Times]:
    """Returns elements and backward times of sparse parameters; a dense one's time counts to the next."""
    elements, backward, carried = [], [], 0.0
    for parameter, seconds in zip(workload.backward, reversed(workload.backward_seconds), strict=True):
        carried += seconds
        if parameter.name in workload.dense:
            carried += float(cost.dense_work.seconds(parameter.num_elements))
        else:
            elements.append(float(parameter.num_elements))
            backward.append(carried)
            carried = 0.0
    return np.array(elements[::-1]), np.array(backward[::-1])


def _timeline(elements: Times, backward: Times, cost: CostModel) -> tuple[Times, Times, float]:
    """Predicts when each layer's backward and communication start, Eqs. (6) to (8), and the end, Eq. (17)."""
    selection = cost.selection.seconds(elements)
    communication = cost.communication.seconds(elements)
    ends = np.cumsum((backward + selection)[::-1])[::-1]  # when selections end
    start_backward = ends - selection - backward
    start_communication, free = np.empty_like(ends), 0.0
    for layer in range(elements.size - 1, -1, -1):
        start_communication[layer] = max(ends[layer], free)
        free = start_communication[layer] + communication[layer]
    return start_backward, start_communication, free


class SegmentTables(NamedTuple):
    """Predicted seconds of every possible bucket: entry [i, j] merges sparse parameters i + 1 to j.

    With computation done at x and the network free at y before it, after it
    ``x' = x + computation[i, j]`` and ``y' = max(y + dense[j] - dense[i], x') + communication[i, j]``.
    """

    computation: Times
    communication: Times
    #: seconds of dense parameters' messages before each end of a segment
    dense: Times


def segment_tables(workload: Workload, cost: CostModel, fused: bool = False) -> SegmentTables:
    """Predicts the seconds of all possible buckets; with `fused` dense messages pay one start-up less."""
    elements, backward = (amounts[::-1] for amounts in _sparse_layers(workload, cost))
    m = elements.size
    computation, communication = np.full((2, m + 1, m + 1), np.inf)
    totals, ready = (np.append(0.0, np.cumsum(amounts)) for amounts in (elements, backward))
    for i in range(m):
        amount = totals[i + 1 :] - totals[i]
        computation[i, i + 1 :] = ready[i + 1 :] - ready[i] + cost.selection.seconds(amount)
        message = cost.communication.seconds(amount)
        communication[i, i + 1 :] = np.where(amount > MAX_BUCKET_ELEMENTS, np.inf, message)
    dense, sent = [0.0], 0.0
    for parameter in workload.backward:
        if parameter.name in workload.dense:
            sent += float(cost.dense.seconds(parameter.num_bytes)) - fused * cost.dense.fixed_seconds
        else:
            dense.append(sent)
    return SegmentTables(computation, communication, np.array(dense))


def optimal(workload: Workload, cost: CostModel) -> Plan:
    """Returns the plan with the shortest predicted step among all that merge neighbouring parameters.

    Dynamic programming over the ends of buckets: a beginning of a plan counts by the pair (end of
    computation, end of communication) alone, and no later time falls when either rises; so of all beginnings
    up to a parameter, those that are beaten in both can be dropped (`best_segments`).

    Exact where all sparse parameters are of one kind, none is dense, and buckets are not fused on
    the network. Otherwise the search approximates the step, and what it finds is compared, by `predict`, with
    `omgs`, `layerwise`, `single` and `fixed`: it is never worse than those.
    """
    if not workload.sparse:
        return Plan((), workload.dense_names)
    candidates = [omgs(workload, cost), layerwise(workload, cost), single(workload, cost)]
    candidates.append(fixed(num_elements=8192)(workload, cost))
    for fused in (False, True) if workload.dense and cost.fuse_dense else (False,):
        segments = best_segments(segment_tables(workload, cost, fused))
        candidates.append(plan_of_segments(workload, segments))
    # the found one last: of equal times, its own
    return min(reversed(candidates), key=lambda plan: predict(workload, plan, cost).iteration_seconds)


#: ends closer than this share of a step are the same: sums of the same times differ by rounding
_SAME, _TINY = 1e-12, np.finfo(np.float64).tiny


def best_segments(tables: SegmentTables) -> list[int]:
    """Returns the ends of the buckets with the shortest step, in backward order, by dynamic programming."""
    (computation, communication, dense), m = tables, len(tables.dense) - 1
    # a share of the step's time, from segments of one parameter, whose messages always fit
    same = _SAME * float((np.diag(computation, 1) + np.diag(communication, 1)).sum())
    computed, communicated = np.zeros(1), np.zeros(1)
    boundary, before = np.zeros(1, np.int64), [np.zeros(1, np.int64)]
    for stop in range(1, m + 1):
        ended = computed + computation[boundary, stop]
        free = communicated + dense[stop] - dense[boundary]
        done = np.maximum(free, ended) + communication[boundary, stop]
        order = np.lexsort((done, np.round(ended / max(same, _TINY))))
        least_before = np.concatenate([[np.inf], np.minimum.accumulate(done[order])[:-1]])
        kept = order[done[order] < least_before - same]
        before.append(kept)
        computed = np.concatenate([computed, ended[kept]])
        communicated = np.concatenate([communicated, done[kept]])
        boundary = np.concatenate([boundary, np.full(kept.size, stop)])
    origin, last = np.concatenate(before), before[-1].size
    state, segments = boundary.size - last + int(np.argmin(communicated[-last:])), list[int]()
    while state:
        segments.append(int(boundary[state]))
        state = int(origin[state])
    return segments[::-1]
