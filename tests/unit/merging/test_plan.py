"""Plans: what they refuse, what they keep apart, and that they are plain values."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.errors import ArgumentError
from horovod_sparse.merging import (
    ParameterFacts,
    Plan,
    explicit_groups,
    fixed_bytes,
    num_buckets,
    same_kind,
)

KINDS = st.tuples(st.sampled_from(["float32", "bfloat16", "float64"]), st.integers(0, 1))


@st.composite
def parameters(draw):
    drawn = draw(st.lists(st.tuples(st.integers(1, 1000), KINDS), min_size=1, max_size=30))
    return [
        ParameterFacts(f"p{i}", num_elements, dtype, group=group)
        for i, (num_elements, (dtype, group)) in enumerate(drawn)
    ]


@given(parameters(), st.integers(1, 5000))
def test_fixed_bytes_covers_everything_in_backward_order_and_keeps_to_the_size(facts, bucket_bytes):
    plan = fixed_bytes(facts, bucket_bytes)
    plan.check(facts)
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
        kind = same_kind(by_name[bucket[0]])
        if kind in latest:
            before = sum(by_name[name].num_bytes for name in latest[kind])
            assert before + by_name[bucket[0]].num_bytes > bucket_bytes
        latest[kind] = bucket


@given(parameters(), st.integers(1, 40))
def test_num_buckets_gives_that_many_for_one_kind(facts, count):
    plan = num_buckets(facts, count)
    plan.check(facts)
    if len({same_kind(fact) for fact in facts}) == 1:
        assert len(plan.buckets) == min(count, len(facts))
        sizes = [len(bucket) for bucket in plan.buckets]
        assert max(sizes) - min(sizes) <= 1


@given(parameters(), st.data())
def test_explicit_groups_become_buckets_and_the_rest_stands_alone(facts, data):
    number = data.draw(st.lists(st.integers(-1, 3), min_size=len(facts), max_size=len(facts)))
    groups = [[fact.name for fact, n in zip(facts, number, strict=True) if n == g] for g in range(4)]
    plan = explicit_groups(facts, [*groups, ["frozen"]])
    plan.check(facts)
    of = {name: n for n, group in enumerate(groups) for name in group}
    for bucket in plan.buckets:
        assert len(bucket) == 1 or len({of[name] for name in bucket}) == 1
    kinds = {(of.get(fact.name, fact.name), same_kind(fact)) for fact in facts}
    assert len(plan.buckets) == len(kinds)


@given(parameters(), st.integers(1, 5000))
def test_plans_survive_json_and_are_values(facts, bucket_bytes):
    plan = fixed_bytes(facts, bucket_bytes)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert hash(again) == hash(plan)


A, B, C = ParameterFacts("a", 4), ParameterFacts("b", 4), ParameterFacts("c", 4, dtype="float64")


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        (Plan((("a",),), ("c",)), "'b'"),
        (Plan((("a", "b"), ("d",)), ("c",)), "'d'"),
        (Plan((("a", "b", "c"),)), "float64"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_by_name(plan, word):
    with pytest.raises(ArgumentError, match=word):
        plan.check([A, B, C])


def test_a_bucket_beyond_int32_is_refused_and_not_made():
    huge = [ParameterFacts("x", 2**30), ParameterFacts("y", 2**30)]
    with pytest.raises(ArgumentError, match=r"2\*\*31"):
        Plan((("y", "x"),)).check(huge)
    assert len(fixed_bytes(huge, 2**40).buckets) == 2


@pytest.mark.parametrize("buckets", [(("a", "a"),), (("a",), ("a",)), (("a",), ())])
def test_duplicates_and_empty_buckets_are_refused(buckets):
    with pytest.raises(ArgumentError, match="plan"):
        Plan(buckets)


@pytest.mark.parametrize("bucket_bytes", [0, -1, 2.5, True, "32"])
def test_bucket_bytes_is_checked(bucket_bytes):
    with pytest.raises(ArgumentError, match="bucket_bytes"):
        fixed_bytes([A], bucket_bytes)


def test_a_broken_file_is_refused():
    with pytest.raises(ArgumentError, match="to_dict"):
        Plan.from_dict({"buckets": [["a"]]})
