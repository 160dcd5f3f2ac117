"""Arguments that contradict each other, and plans that all ranks take alike or refuse alike."""

import dataclasses
import logging
import re

import pytest

from horovod_sparse import errors
from horovod_sparse.merging import ParameterFacts, Plan, Profile, fixed, min_elements
from horovod_sparse.planning import FirstPlan, described_request, first_plan, plan_request
from horovod_sparse.planning.model import Fit
from horovod_sparse.plans import DENSE_BELOW
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.sparsifiers.exdyna import ExDyna
from horovod_sparse.sparsifiers.topk import TopK
from horovod_sparse.topology import ClusterFacts
from horovod_sparse.training.agreement import compare


def profile_of_two(selection: dict[str, Fit], backward: dict[str, float], forward: float) -> Profile:
    """Of two ranks, both of whose collectives take 1 ms and 10 ns a byte."""
    collectives = dict.fromkeys(("allgather", "allreduce"), Fit(1e-3, 1e-8))
    made = Profile(2, "torch", "gloo", 0.001, collectives, selection)
    return dataclasses.replace(made, backward_seconds=backward, forward_seconds=forward)


FACTS = [ParameterFacts(name, size) for name, size in (("a", 4000), ("b", 10), ("c", 300_000), ("d", 20_000))]
TIMES = {"a": 2e-3, "b": 1e-3, "c": 5e-3, "d": 4e-3}
PROFILE = dataclasses.replace(
    profile_of_two({"topk": Fit(1e-5, 1e-9, 1e-8)}, TIMES, 3e-3), decoding={"topk": Fit(1e-5, 0.0, 1e-8)}
)
TOPK = TopK(density=0.01)


def where(rank):
    return ClusterFacts(rank, 2, "torch", "gloo")


def asked(**arguments):
    return plan_request(**arguments)[0]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"merging": "optimal", "plan": Plan((("a",),))}, "merging and plan"),
        ({"merging": "single", "groups": 2}, "merging and groups"),
        ({"groups": 2, "bucket_bytes": 8}, "groups and bucket_bytes"),
        ({"tensor_selection": "cost", "plan": Plan((("a",),))}, "tensor_selection and plan"),
        ({"profile": PROFILE}, "merging='optimal'"),
        ({"merging": "optimal", "profile": 7}, "path of a saved"),
    ],
)
def test_arguments_that_contradict_each_other_are_named(arguments, match):
    with pytest.raises(errors.ArgumentError, match=match):
        plan_request(**arguments)


def test_plans_without_times_are_made_at_once():
    plan = Plan((("d", "c", "b", "a"),))
    assert plan_request(merging=plan) == (None, plan)
    assert plan_request(groups=2) == (None, None)
    assert plan_request() == (None, None)
    assert asked(merging="single").plan_without_times(FACTS) == plan
    assert asked(merging="layerwise").plan_without_times(FACTS).buckets == (("d",), ("c",), ("b",), ("a",))
    chosen = asked(merging=fixed(num_elements=8192), tensor_selection=min_elements(100))
    assert not chosen.needs_times
    assert chosen.plan_without_times(FACTS) == Plan((("d",), ("c",), ("a",)), ("b",))
    by_bytes = asked(tensor_selection=lambda parameter: parameter.name != "c", bucket_bytes=16_040)
    assert by_bytes.plan_without_times(FACTS) == Plan((("d",), ("b", "a")), ("c",))


def begun(*facts, **arguments):
    named = {fact.name: (fact, None) for fact in facts}
    return first_plan(None, named, ExDyna(density=0.01), lambda: where(0), **arguments)


@pytest.fixture
def nothing_said(monkeypatch):
    monkeypatch.delenv("HOROVOD_SPARSE_TENSOR_SELECTION", raising=False)


def test_small_buckets_stay_dense_with_one_line_that_says_so(nothing_said, caplog):
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        begin = begun(
            ParameterFacts("a", DENSE_BELOW),
            ParameterFacts("b", DENSE_BELOW - 1, group=1),
            ParameterFacts("c", 10, density=0.5),
        )
    assert begin.plan == Plan((("c",), ("a",)), ("b",))
    assert begin.selection.startswith("65,535 of 131,081 elements stay dense: buckets of fewer than 65,536")
    (record,) = caplog.records
    told = record.getMessage()
    assert "tensor_selection='all'" in told and "HOROVOD_SPARSE_TENSOR_SELECTION=all" in told


def test_the_environment_sparsifies_all_or_is_refused(nothing_said, monkeypatch):
    monkeypatch.setenv("HOROVOD_SPARSE_TENSOR_SELECTION", "all")
    assert begun(ParameterFacts("a", 10)) == FirstPlan(Plan((("a",),)))
    monkeypatch.setenv("HOROVOD_SPARSE_TENSOR_SELECTION", "formulas")
    with pytest.raises(errors.UnknownNameError, match="'formulas': the known ones are all, large"):
        begun(ParameterFacts("a", 10))


@pytest.mark.parametrize("arguments", [{"groups": 1}, {"bucket_bytes": 1 << 20}, {"plan": Plan((("a",),))}])
def test_buckets_that_are_asked_for_are_sparsified_though_small(arguments, nothing_said):
    assert begun(ParameterFacts("a", 1000), **arguments).plan == Plan((("a",),))


def test_a_profile_decides_and_says_why():
    wanted = asked(merging="optimal", tensor_selection="cost", profile=PROFILE)
    made = first_plan(wanted, {fact.name: (fact, None) for fact in FACTS}, TOPK, lambda: where(0)).decision
    assert sorted(made.plan.names()) == sorted(TIMES)
    assert made.predicted_seconds["taken"] <= made.predicted_seconds["layerwise"]
    assert "merging=optimal, tensor_selection=cost" in str(made)
    assert "predicted per iteration: taken" in str(made)


def test_what_differs_between_ranks_is_refused_by_all(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    for arguments, match in (
        ({"merging": "omgs", "profile": PROFILE}, r"ranks \[1\] merging=omgs"),
        (
            {"profile": dataclasses.replace(PROFILE, cycle_seconds=0.002)},
            r"profile differs: ranks \[0\] have ",
        ),
        ({"profile": None}, "profile differs: .*measured_profile"),
        ({"profile": broken}, "profile differs: .*no JSON object with a version"),
        ({"profile": tmp_path / "missing.json"}, "profile differs: .*cannot be read"),
    ):
        given = {"merging": "optimal", "profile": PROFILE}
        texts = [described_request(asked(**one)) for one in (given, {**given, **arguments})]
        for end in run_lockstep([compare(text) for text in texts], keep_errors=True):
            assert type(end) is errors.StateMismatchError
            assert re.search(match, str(end))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"backward_seconds": {"a": 1.0, "b": 1.0, "c": 1.0}}, "no backward time for d"),
        ({"backward_seconds": dict.fromkeys(TIMES, 0.0)}, "takes no time"),
        ({"backward_seconds": {}}, "measured_profile"),
        ({"selection": {}}, "no selection time for topk"),
        ({"collectives": {}}, "no collectives"),
        ({"size": 1}, "1 rank"),
    ],
)
def test_a_profile_that_cannot_be_applied_is_refused(changed, match):
    wanted = asked(merging="optimal", profile=dataclasses.replace(PROFILE, **changed))
    first = first_plan(wanted, {fact.name: (fact, None) for fact in FACTS}, TOPK, lambda: where(0))
    assert re.search(match, str(first.failure))
