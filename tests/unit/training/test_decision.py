"""Arguments that contradict each other, and plans that all ranks take alike or refuse alike."""

import dataclasses
import logging

import numpy as np
import pytest

from horovod_sparse import errors
from horovod_sparse.merging import Fit, ParameterFacts, Plan, fixed, min_elements
from horovod_sparse.planning import FirstPlan, first_plan, plan_request
from horovod_sparse.planning.calibration import Extent
from horovod_sparse.planning.warmup import BackwardTimes, decide
from horovod_sparse.plans import DENSE_BELOW
from horovod_sparse.simulation import AlphaBeta, run_lockstep
from horovod_sparse.sparsifiers.exdyna import ExDyna
from horovod_sparse.sparsifiers.topk import TopK
from horovod_sparse.topology import ClusterFacts, Topology
from support.merging_models import all_plans, profile_of_hosts, profile_of_two, seconds
from support.sampling import rows_by

FACTS = [ParameterFacts(name, size) for name, size in (("a", 4000), ("b", 10), ("c", 300_000), ("d", 20_000))]
TIMES = {"a": 2e-3, "b": 1e-3, "c": 5e-3, "d": 4e-3}
PROFILE = dataclasses.replace(
    profile_of_two({"topk": Fit(1e-5, 1e-9, 1e-8)}, TIMES, 3e-3), decoding={"topk": Fit(1e-5, 0.0, 1e-8)}
)
BACKWARD = BackwardTimes(dict(reversed(TIMES.items())), 3e-3)
EXTENT = Extent((64, 256, 1024), (500, 1000, 2000), 1, 1e9)
TOPK = TopK(density=0.01)


def where(rank):
    return ClusterFacts(rank, 2, "torch", "gloo")


def decided(askeds, times=BACKWARD, **arguments):
    coroutines = [
        decide(asked, where(rank), FACTS, TOPK, times, extent=EXTENT, **arguments)
        for rank, asked in enumerate(askeds)
    ]
    return run_lockstep(coroutines, keep_errors=True)


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
    assert asked(merging="single").first_plan(FACTS) == plan
    assert asked(merging="layerwise").first_plan(FACTS).buckets == (("d",), ("c",), ("b",), ("a",))
    chosen = asked(merging=fixed(num_elements=8192), tensor_selection=min_elements(100))
    assert not chosen.measures
    assert chosen.first_plan(FACTS) == Plan((("d",), ("c",), ("a",)), ("b",))
    by_bytes = asked(tensor_selection=lambda parameter: parameter.name != "c", bucket_bytes=16_040)
    assert by_bytes.first_plan(FACTS) == Plan((("d",), ("b", "a")), ("c",))


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


@pytest.mark.parametrize("profile", [None, dataclasses.replace(PROFILE, backward_seconds={}), PROFILE])
def test_all_ranks_take_one_plan_whatever_was_measured_where(profile):
    other = dataclasses.replace(BACKWARD, forward_seconds=9.0)
    wanted = asked(merging="optimal", tensor_selection="cost", profile=profile)
    pairs = enumerate((BACKWARD, other))
    coroutines = [decide(wanted, where(rank), FACTS, TOPK, times, extent=EXTENT) for rank, times in pairs]
    one, two = run_lockstep(coroutines)
    assert one == two
    assert sorted(one.plan.names()) == sorted(TIMES)
    if profile is not None:  # by costs measured here a parameter may stay dense that layers do not
        assert one.predicted_seconds["taken"] <= one.predicted_seconds["layerwise"]
    assert one.profile.backward_seconds == TIMES
    assert list(one.profile.backward_seconds) == list(TIMES), "the model's order"
    assert one.profile.forward_seconds == (3e-3 if profile is PROFILE else pytest.approx(4.5015))
    assert "merging=optimal, tensor_selection=cost" in str(one)
    assert "predicted per iteration: taken" in str(one)


def refusing(ends, kind, match):
    assert len(ends) > 1
    for end in ends:
        assert type(end) is kind
        assert match in str(end)


def test_what_differs_between_ranks_or_cannot_be_read_is_refused_by_all(tmp_path):
    ends = decided([asked(merging=name) for name in ("optimal", "omgs")])
    refusing(ends, errors.StateMismatchError, "ranks [1] merging=omgs")
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    for other, match in (
        (dataclasses.replace(PROFILE, cycle_seconds=0.002), "profile differs: ranks [0] have "),
        (None, "profile differs: ranks [0] have "),
        (broken, "no JSON object with a version"),
        (tmp_path / "missing.json", "cannot be read"),
    ):
        ends = decided([asked(merging="optimal", profile=p) for p in (PROFILE, other)])
        refusing(ends, errors.StateMismatchError, match)
        assert ", ranks [1] " in str(ends[0])
    ends = decided([asked(merging="optimal", profile=tmp_path / "missing.json")] * 2)
    refusing(ends, errors.ProfileMismatchError, "cannot be read")


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"backward_seconds": {"a": 1.0, "b": 1.0, "c": 1.0}}, "no backward time for d"),
        ({"backward_seconds": dict.fromkeys(TIMES, 0.0)}, "takes no time"),
        ({"selection": {}}, "no selection time for topk"),
        ({"collectives": {}}, "no collectives"),
        ({"size": 1}, "1 rank"),
    ],
)
def test_a_profile_that_cannot_be_applied_is_refused_by_all(changed, match):
    profile = dataclasses.replace(PROFILE, **changed)
    refusing(decided([asked(merging="optimal", profile=profile)] * 2), errors.ProfileMismatchError, match)
    # and where backward was measured, too
    if "backward_seconds" not in changed:
        profile = dataclasses.replace(profile, backward_seconds={})
        refusing(decided([asked(merging="optimal", profile=profile)] * 2), errors.ProfileMismatchError, match)


SIZES = (40_000, 100, 300_000, 20_000, 5_000, 90_000, 700, 250_000, 60_000)
NINE = [ParameterFacts(f"p{number}", size) for number, size in enumerate(SIZES)]
HOSTS = Topology.regular(2, 2)
SELECTION = Fit(1e-4, 1e-9)
SLOW, FAST = AlphaBeta(1e-4, 8e-9), AlphaBeta(2e-5, 2.5e-10)


def profile_of(seed=0, between=SLOW, inside=FAST, selection=SELECTION, **changed):
    random = np.random.default_rng(seed)
    made = profile_of_hosts(between, inside, 2, 2, selection)
    times = {fact.name: float(each) for fact, each in zip(NINE, random.exponential(2e-4, 9), strict=True)}
    return dataclasses.replace(
        made, framework="torch", controller="gloo", backward_seconds=times, forward_seconds=1e-3, **changed
    )


def on_hosts(levels="host", rank=0):
    return ClusterFacts(rank, 4, "torch", "gloo", 1e-3, topology=HOSTS if levels == "host" else None)


@rows_by("merging,seed", ["optimal", "omgs"], range(3))
def test_a_plan_is_held_against_all_plans_in_the_model_of_two_levels(merging, seed):
    profile = profile_of(seed, between=AlphaBeta(3e-4, 8e-9))
    made = asked(merging=merging).decided(on_hosts(), NINE, TOPK, profile)
    workload, cost = profile.step(NINE, TOPK, 4, HOSTS)
    fused = dataclasses.replace(cost, fuse_sparse=False)  # what `optimal` proves is without
    best = min(seconds(workload, plan, fused) for plan in all_plans(workload))
    taken = seconds(workload.with_dense(made.plan.dense), made.plan, fused)
    if merging == "optimal":
        assert taken == pytest.approx(best)
    assert taken <= 1.2 * best, "the flat model's plan is further off"
    assert made.predicted_seconds["taken"] == pytest.approx(
        seconds(workload.with_dense(made.plan.dense), made.plan, cost)
    )
