"""The two queues of a step by hand, and strategies: of the paper, and the exact one against all plans."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.layers import layer_table
from benchmarks.plans import SortingTime
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.merging import CostModel, ParameterFacts, Plan, Workload, fixed, predict
from horovod_sparse.planning import plan_request
from horovod_sparse.planning.model import AffineTime, BusyTime, plan_of_segments
from horovod_sparse.planning.strategies import best_segments, layerwise, omgs, optimal, segment_tables, single
from horovod_sparse.plans import fixed_elements


def chain(*times: float, elements: int = 100) -> Workload:
    return Workload(tuple(ParameterFacts(f"l{i + 1}", elements) for i in range(len(times))), times)


# Selection takes nothing, so Q3 is u < tau_c + t_c and Q5 is tau_c + alpha > u.
COST = CostModel(AffineTime(), AffineTime(1.0, 0.01))  # t_c = 2 for 100 elements


@pytest.mark.parametrize(
    ("times", "buckets"),
    [
        # l = 3: tau_b 0, t_b 1, u = 1 + t_b(2); tau_c(3) = 1. t_b(2) = 0.9: Q5 2 > 1.9, Q3 1.9 < 3: merged.
        # Then l = 2 (200 elements): u = 1.9 + 5, tau_c(2) = 1.9: apart.
        ((5.0, 0.9, 1.0), (("l3", "l2"), ("l1",))),
        # t_b(2) = 1.1: Q5 2 > 2.1 is false: l = L stays apart (the public program always merges it).
        # l = 2: tau_c(2) = max(2.1, 1 + 2) = 3, u = 2.1 + 0.5 = 2.6: 4 > 2.6 and 2.6 < 5: merged.
        ((0.5, 1.1, 1.0), (("l3",), ("l2", "l1"))),
        # the same, but l = 2 has to wait too long: nothing is merged.
        ((2.0, 1.1, 1.0), (("l3",), ("l2",), ("l1",))),
        # all of them
        ((0.5, 0.5, 1.0), (("l3", "l2", "l1"),)),
    ],
)
def test_omgs_by_hand(times, buckets) -> None:
    assert omgs(chain(*times), COST).buckets == buckets


KINDS = (("float32", "cpu", 0), ("float32", "cpu", 1), ("float64", "cpu", 0))


@st.composite
def workloads(draw, max_layers: int = 9, kinds: int = 1, dense: bool = False) -> Workload:
    rows = draw(
        st.lists(
            st.tuples(st.integers(1, 5000), st.floats(0.0, 5.0), st.integers(0, kinds - 1), st.booleans()),
            min_size=1,
            max_size=max_layers,
        )
    )
    facts, times, stays = [], [], []
    for number, (elements, seconds, kind, is_dense) in enumerate(rows):
        dtype, device, group = KINDS[kind]
        facts.append(ParameterFacts(f"p{number}", elements, dtype, device, group))
        times.append(seconds)
        if dense and is_dense:
            stays.append(f"p{number}")
    times[0] += 0.125  # something has to take time
    return Workload(tuple(facts), tuple(times), draw(st.floats(0.0, 1.0)), frozenset(stays))


@st.composite
def costs(draw) -> CostModel:
    selection = draw(
        st.one_of(
            st.builds(AffineTime, st.floats(0.0, 1.0), st.floats(0.0, 1e-3)),
            st.builds(SortingTime, st.floats(0.0, 1e-4)),
        )
    )
    communication = draw(st.builds(AffineTime, st.floats(0.0, 3.0), st.floats(0.0, 1e-3)))
    dense = draw(st.builds(AffineTime, st.floats(0.0, 3.0), st.floats(0.0, 1e-3)))
    return CostModel(selection, communication, dense)


def all_plans(workload: Workload) -> Iterator[Plan]:
    """Every way to merge neighbours: 2^(m - 1) plans."""
    m = len(workload.sparse)
    for cuts in range(2 ** (m - 1)):
        ends = [place for place in range(1, m) if cuts >> (place - 1) & 1]
        yield plan_of_segments(workload, [*ends, m])


def seconds(workload: Workload, plan: Plan, cost: CostModel) -> float:
    return predict(workload, plan, cost).iteration_seconds


@settings(deadline=None, max_examples=40)
@given(workloads(max_layers=9), costs())
def test_optimal_is_the_best_of_all_plans(workload, cost) -> None:
    best = min(seconds(workload, plan, cost) for plan in all_plans(workload))
    assert seconds(workload, optimal(workload, cost), cost) == pytest.approx(best, rel=1e-9, abs=1e-12)
    # and so is the search alone, without the plans that it is compared with
    found = plan_of_segments(workload, best_segments(segment_tables(workload, cost)))
    assert seconds(workload, found, cost) == pytest.approx(best, rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(workloads(max_layers=10, kinds=3, dense=True), costs())
def test_optimal_is_never_worse_than_the_others_and_none_mixes_kinds(workload, cost) -> None:
    best = seconds(workload, optimal(workload, cost), cost)
    for strategy in (optimal, layerwise, single, omgs, fixed(num_elements=8192)):
        plan = strategy(workload, cost)
        plan.check(workload.parameters)  # which refuses a bucket of two kinds
        assert best <= seconds(workload, plan, cost) * (1 + 1e-12)
        assert plan.dense == workload.dense_names


def test_fixed_closes_a_bucket_once_it_is_full() -> None:
    facts = [ParameterFacts(f"p{i}", n) for i, n in enumerate([5, 4, 6, 9, 1])]
    assert fixed_elements(facts, 10).buckets == (("p4", "p3"), ("p2", "p1"), ("p0",))
    workload = Workload(tuple(facts), (1.0,) * 5)
    assert fixed(bytes=40)(workload).buckets == (("p4", "p3"), ("p2", "p1"), ("p0",))
    assert fixed(bytes=39)(workload).buckets == (("p4",), ("p3",), ("p2",), ("p1", "p0"))


@pytest.mark.parametrize(
    ("name", "merged"), [("vgg16_cifar", 13), ("resnet50", 53), ("inception_v4", 150), ("lstm_ptb", 9)]
)
def test_the_papers_table_v_for_what_does_not_depend_on_times(name, merged) -> None:
    assert len(fixed(num_elements=8192)(layer_table(name).workload).buckets) == merged


def test_strategies_are_found_by_name_or_refused() -> None:
    named = [plan_request(merging=name)[0] for name in ("layerwise", "single", "omgs", "optimal")]
    assert [request.strategy for request in named] == [layerwise, single, omgs, optimal]
    assert [request.needs_times for request in named] == [False, False, True, True]
    assert plan_request(merging=fixed(bytes=100))[0].strategy == fixed(bytes=100)
    with pytest.raises(UnknownNameError, match=r"'optimum'.*optimal"):
        plan_request(merging="optimum")
    with pytest.raises(ArgumentError, match="merging=3"):
        plan_request(merging=3)
    for arguments in ({}, {"num_elements": 1, "bytes": 1}, {"bytes": 0}, {"num_elements": True}):
        with pytest.raises(ArgumentError):
            fixed(**arguments)


A, B, C = (ParameterFacts(name, size) for name, size in (("a", 10), ("b", 20), ("c", 30)))


def kinds_and_ends(spans: tuple[BusyTime, ...]) -> list[tuple[str, float, float]]:
    return [(span.kind, round(span.start, 9), round(span.end, 9)) for span in spans]


def test_three_layers_by_hand() -> None:
    # selection 1 + 0.1 n, communication 2 + 0.05 n; backward c 1, b 2, a 3 after a forward of 4;
    # b stays dense: packing 1 + 0.1 n, allreduce 2 + 0.025 n of its 80 bytes
    workload = Workload((A, B, C), (3.0, 2.0, 1.0), forward_seconds=4.0, dense=frozenset("b"))
    cost = CostModel(
        AffineTime(1.0, 0.1), AffineTime(2.0, 0.05), AffineTime(2.0, 0.025), AffineTime(1.0, 0.1)
    )
    timeline = predict(workload, layerwise(workload), cost)
    assert kinds_and_ends(timeline.computation) == [
        ("forward", 0.0, 4.0),
        ("backward", 4.0, 5.0),
        ("selection", 5.0, 9.0),  # 1 + 3
        ("backward", 9.0, 11.0),
        ("packing", 11.0, 14.0),  # 1 + 2
        ("backward", 14.0, 17.0),
        ("selection", 17.0, 19.0),
    ]
    assert kinds_and_ends(timeline.communication) == [
        ("sparse", 9.0, 12.5),
        ("dense", 14.0, 18.0),
        ("sparse", 19.0, 21.5),
    ]
    assert timeline.iteration_seconds == 21.5
