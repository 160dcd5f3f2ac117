"""Plans: what they refuse, what they keep apart, and that they are plain values."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse import merging, plans
from horovod_sparse.errors import ArgumentError
from horovod_sparse.planning.model import AffineTime
from horovod_sparse.planning.request import select_tensors

DTYPES, DENSITIES = st.sampled_from(["float32", "bfloat16", "float64"]), st.sampled_from([0.0, 0.02, 1.0])
KINDS = st.tuples(DTYPES, st.integers(0, 1), DENSITIES)


@st.composite
def parameters(draw):
    drawn = draw(st.lists(st.tuples(st.integers(1, 1000), KINDS), min_size=1, max_size=30))
    return [
        merging.ParameterFacts(f"p{i}", num_elements, dtype, group=group, density=density)
        for i, (num_elements, (dtype, group, density)) in enumerate(drawn)
    ]


@given(parameters(), st.integers(1, 5000))
def test_fixed_bytes_covers_everything_in_backward_order_and_keeps_to_the_size(facts, bucket_bytes):
    plan = plans.fixed_bytes(facts, bucket_bytes)
    plan.check(facts)
    plans.num_buckets(facts, 1).check(facts)
    by_name = {fact.name: fact for fact in facts}
    place = {fact.name: i for i, fact in enumerate(facts)}
    for bucket in plan.buckets:
        places = [place[name] for name in bucket]
        assert places == sorted(places, reverse=True)
        assert len(bucket) == 1 or sum(by_name[name].num_bytes for name in bucket) <= bucket_bytes
    firsts = [place[bucket[0]] for bucket in plan.buckets]
    assert firsts == sorted(firsts, reverse=True)
    # a bucket closes only because the next parameter of its kind did not fit
    latest = {}
    for bucket in plan.buckets:
        kind = plans.grouping_key(by_name[bucket[0]])
        if kind in latest:
            before = sum(by_name[name].num_bytes for name in latest[kind])
            assert before + by_name[bucket[0]].num_bytes > bucket_bytes
        latest[kind] = bucket


@given(parameters(), st.data())
def test_explicit_groups_become_buckets_and_the_rest_stands_alone(facts, data):
    number = data.draw(st.lists(st.integers(-1, 3), min_size=len(facts), max_size=len(facts)))
    groups = [[fact.name for fact, n in zip(facts, number, strict=True) if n == g] for g in range(4)]
    plan = plans.explicit_groups(facts, [*groups, ["frozen"]])
    plan.check(facts)
    of = {name: n for n, group in enumerate(groups) for name in group}
    for bucket in plan.buckets:
        assert len(bucket) == 1 or len({of[name] for name in bucket}) == 1
    kinds = {(of.get(fact.name, fact.name), plans.grouping_key(fact)) for fact in facts}
    assert len(plan.buckets) == len(kinds)


A, B, C = (
    merging.ParameterFacts("a", 4),
    merging.ParameterFacts("b", 4),
    merging.ParameterFacts("c", 4, dtype="float64"),
)


@pytest.mark.parametrize(
    ("buckets", "dense", "word"),
    [
        ((("a",),), ("c",), "'b'"),
        ((("a", "b"), ("d",)), ("c",), "'d'"),
        ((("a", "b", "c"),), (), "float64"),
        ((("a", "a"),), (), "plan"),
        ((("a",), ("a",)), (), "plan"),
        ((("a",), ()), (), "plan"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_by_name(buckets, dense, word):
    with pytest.raises(ArgumentError, match=word):
        merging.Plan(buckets, dense).check([A, B, C])


def test_a_bucket_beyond_int32_is_refused_and_not_made():
    huge = [merging.ParameterFacts("x", 2**30), merging.ParameterFacts("y", 2**30)]
    with pytest.raises(ArgumentError, match=r"2\*\*31"):
        merging.Plan((("y", "x"),)).check(huge)
    assert len(plans.fixed_bytes(huge, 2**40).buckets) == 2


def chosen(rule, sizes, cost=None):
    facts = [merging.ParameterFacts(f"p{size}", size) for size in sizes]
    dense = select_tensors(rule, facts, cost)
    return {fact.num_elements: fact.name in dense for fact in facts}


def test_rules_at_their_borders() -> None:
    # T_comp = 1, T_spr = 2, T_full = 0.5 + 0.125 * 4 n: n = 5 gives exactly 3, which is no gain
    cost = merging.CostModel(AffineTime(1.0), AffineTime(2.0), AffineTime(0.5, 0.125))
    assert chosen("cost", [4, 5, 6], cost) == {4: True, 5: True, 6: False}
    # work for a dense parameter is part of T_full: 0.25 n, and 5 pays
    worked = dataclasses.replace(cost, dense_work=AffineTime(0.0, 0.25))
    assert chosen("cost", [1, 5], worked) == {1: True, 5: False}
    assert chosen("all", [1, 10]) == {1: False, 10: False}
    assert chosen(merging.min_elements(10), [9, 10]) == {9: True, 10: False}
    assert chosen(lambda parameter: parameter.name == "p3", [3, 4]) == {3: False, 4: True}


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("costs", "costs"),
        ("cost", "profile"),
        (3, "tensor_selection=3"),
        (lambda parameter: "yes", "returns a bool for a"),
    ],
)
def test_rules_of_selection_that_cannot_be_are_refused(rule: Any, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        select_tensors(rule, [merging.ParameterFacts("a", 1)])
    with pytest.raises(ArgumentError, match="min_elements=0"):
        merging.min_elements(0)
