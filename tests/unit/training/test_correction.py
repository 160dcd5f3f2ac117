"""Predictions corrected by whole iterations."""

import dataclasses
import itertools

import pytest

from horovod_sparse.cost import Fit, with_levels
from horovod_sparse.errors import ProfileMismatchError
from horovod_sparse.merging import ParameterFacts, Plan, fixed, predict
from horovod_sparse.planning import plan_request
from horovod_sparse.planning.calibration.steps import (
    BackwardRecorder,
    BackwardTimes,
    _scaled,
    corrected,
    mean_times,
    measured_step,
    probe_of,
)
from horovod_sparse.planning.warmup import decide
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.sparsifiers import TopK
from horovod_sparse.topology import Topology
from support.merging_models import profile_of_two

TOPK = TopK(density=0.01)
FACTS = [ParameterFacts(f"p{number}", 1000 * (1 + number % 7)) for number in range(40)]
NAMES = tuple(fact.name for fact in reversed(FACTS))
SINGLE, LAYERWISE = Plan((NAMES,)), Plan(tuple((name,) for name in NAMES))
PROFILE = profile_of_two({"topk": Fit(1e-4, 1e-9)}, {fact.name: 1e-4 for fact in FACTS}, 2e-3)


def seconds(profile, plan):
    workload, cost = measured_step(profile, FACTS, TOPK, 2)
    return predict(workload, plan, cost).iteration_seconds


def measured(truth, *plans):
    """Iterations as they are where the truth is this profile."""
    return BackwardTimes({}, 0.0, 5, (), *(seconds(truth, plan) for plan in plans))


def test_time_per_bucket_and_time_per_iteration_are_told_apart():
    truth = dataclasses.replace(
        PROFILE, selection={"topk": Fit(4e-4, 1e-9)}, forward_seconds=PROFILE.forward_seconds + 7e-3
    )
    found = corrected(PROFILE, measured(truth, SINGLE, LAYERWISE), SINGLE, FACTS, TOPK, 2)
    assert found.selection["topk"].fixed_seconds == pytest.approx(4e-4, rel=0.05)
    assert found.forward_seconds == pytest.approx(truth.forward_seconds, rel=0.05)
    assert "come from whole iterations" in found.selection["topk"].notes[-1]
    between = fixed(num_elements=8192)(measured_step(PROFILE, FACTS, TOPK, 2)[0])
    assert 1 < len(between.buckets) < 40
    for plan in (SINGLE, between, LAYERWISE):
        assert seconds(found, plan) == pytest.approx(seconds(truth, plan), rel=0.01)


def test_what_a_prediction_is_too_long_by_is_taken_off_all_costs_alike():
    """The plan in use is then predicted as it was measured; forward and backward are as they were."""
    collectives = {**PROFILE.collectives, "allgather": Fit(5e-4, 1e-8)}
    fast = dataclasses.replace(PROFILE, selection={"topk": Fit(5e-5, 1e-9)}, collectives=collectives)
    found = corrected(PROFILE, measured(fast, SINGLE), SINGLE, FACTS, TOPK, 2)
    assert seconds(PROFILE, SINGLE) > 1.02 * seconds(fast, SINGLE)
    assert seconds(found, SINGLE) == pytest.approx(seconds(fast, SINGLE), rel=1e-3)
    factor = found.collectives["allgather"].fixed_seconds / 1e-3
    assert 0.25 < factor < 0.95
    assert found.selection["topk"].seconds_per_unit == pytest.approx(factor * 1e-9)
    assert found.collectives["allreduce"].seconds_per_unit == pytest.approx(factor * 1e-8)
    assert "whole iterations come out" in found.selection["topk"].notes[-1]
    assert found.backward_seconds == PROFILE.backward_seconds
    assert found.forward_seconds == PROFILE.forward_seconds
    order = [sorted((SINGLE, LAYERWISE), key=lambda plan: seconds(one, plan)) for one in (PROFILE, found)]
    assert order[0] == order[1]


def test_no_cost_is_left_out_of_what_is_taken_off():
    profile = with_levels(dataclasses.replace(PROFILE, size=4), 2)
    profile = dataclasses.replace(profile, decoding={"topk": Fit(1e-5, 0.0, 1e-8)})
    before, after = (
        {**one.levels, "collectives": one.collectives, "selection": one.selection, "decoding": one.decoding}
        for one in (profile, _scaled(profile, 0.5))
    )
    for group, name in [(kind, name) for kind, fits in before.items() for name in fits]:
        one, other = (dataclasses.astuple(costs[group][name])[:3] for costs in (before, after))
        assert other == pytest.approx([0.5 * seconds for seconds in one])


@pytest.mark.parametrize(("one", "many"), [(0.95, 1.3), (0.95, 2.0), (0.92, 2.0), (1.4, 3.0)])
def test_one_iteration_is_shorter_and_many_buckets_take_longer_than_their_parts(one, many):
    """As with two levels on shared cores: both measured plans come out as they were."""
    truth = {SINGLE: one * seconds(PROFILE, SINGLE), LAYERWISE: many * seconds(PROFILE, LAYERWISE)}
    times = BackwardTimes({}, 0.0, 5, (), truth[SINGLE], truth[LAYERWISE])
    found = corrected(PROFILE, times, SINGLE, FACTS, TOPK, 2)
    for plan, took in truth.items():
        # where messages are sent together, a little more time of a bucket may be much less of a step
        assert seconds(found, plan) == pytest.approx(took, rel=0.03)


def test_with_two_levels_a_probe_has_some_buckets_and_none_is_fused_with_another():
    """161 buckets took 14 seconds a step there: each waits for three rounds of its own."""
    topology = Topology.regular(4, 2)
    for lengths in ((161,), (90, 71), (17, 17), (9,) * 20):
        names = [f"p{number}" for number in range(sum(lengths))]
        left = iter(names)
        plan = Plan(tuple(tuple(itertools.islice(left, length)) for length in lengths))
        probe = probe_of(plan, topology)
        assert len(probe.buckets) == {1: 32, 2: 32, 20: 40}[len(lengths)]
        assert [name for bucket in probe.buckets for name in bucket] == names
    assert probe_of(SINGLE, Topology.regular(4, 1)) == LAYERWISE
    topology = Topology.regular(2, 2)
    profile = with_levels(dataclasses.replace(PROFILE, size=4), 2)
    workload, cost = measured_step(profile, FACTS, TOPK, 4, topology)
    assert not cost.fuse_sparse
    rounds = cost.communication.fixed_seconds
    spent = [predict(workload, plan, cost).communication for plan in (SINGLE, LAYERWISE)]
    assert [len(spans) for spans in spent] == [1, len(FACTS)]
    assert sum(span.end - span.start for span in spent[1]) > len(FACTS) * rounds > 0


def test_iterations_of_a_denser_warm_up_do_not_make_predictions_longer():
    """Measured while a schedule had density 0.5; the model is right, so nothing is to be corrected."""
    denser = TopK(density=0.5)
    workload, cost = measured_step(PROFILE, FACTS, denser, 2)
    iteration = predict(workload, SINGLE, cost).iteration_seconds
    complete = dataclasses.replace(PROFILE, backward_seconds={}, forward_seconds=0.0)
    backward = dict(reversed(PROFILE.backward_seconds.items()))
    times = BackwardTimes(backward, PROFILE.forward_seconds, 5, (), iteration)

    def decided(**told):
        request = plan_request(merging="single", profile=complete)[0]
        request = dataclasses.replace(request, selection="cost")
        where = [ClusterFacts(rank, 2, "torch", "gloo") for rank in range(2)]
        told |= {"current": SINGLE}
        return run_lockstep([decide(request, one, FACTS, TOPK, times, **told) for one in where])

    assert decided(current_density=0.5)[0].profile.forward_seconds == pytest.approx(PROFILE.forward_seconds)
    assert decided()[0].profile.forward_seconds > 1.05 * PROFILE.forward_seconds


def step(recorder, gaps, start=100.0, hook=0.5, end=None):
    """One step whose gradients come after these gaps; every hook takes half a second itself."""
    clock = start
    recorder.begin(clock)
    for name, gap in gaps.items():
        clock += gap
        recorder.arrived(name, clock, clock + hook)
        clock += hook
    recorder.end(None if end is None else start + end)


def test_medians_of_the_steps_after_the_warm_up_without_the_hooks_own_time():
    recorder = BackwardRecorder(["a", "b", "c"], num_warmup=1, num_steps=3)
    step(recorder, {"c": 90.0, "b": 90.0, "a": 90.0})  # compiles
    for extra in (0.0, 50.0, 1.0):  # one slow step changes no median
        step(recorder, {"c": 3.0 + extra, "b": 2.0, "a": 4.0 + extra}, end=99.0)
    assert recorder.done
    assert recorder.times() == BackwardTimes({"c": 0.0, "b": 2.0, "a": 5.0}, 4.0, 3, (9.0, 109.0, 11.0), 99.0)
    step(recorder, {"c": 900.0, "b": 900.0, "a": 900.0})  # not asked for any more
    assert recorder.times().forward_seconds == 4.0


def test_the_first_step_has_no_beginning_and_one_that_was_given_up_does_not_count():
    recorder = BackwardRecorder(["a"], num_warmup=0, num_steps=1)
    recorder.arrived("a", 1.0, 1.0)
    recorder.end()
    assert not recorder.done
    recorder.begin(2.0)
    recorder.arrived("a", 3.0, 3.0)
    recorder.forget()
    recorder.end()
    assert not recorder.done
    with pytest.raises(ProfileMismatchError, match="few steps"):
        recorder.times()


def test_ranks_agree_on_times_and_their_order_and_without_any_all_refuse():
    times = BackwardTimes({"b": 1.0, "a": 3.0}, 2.0, 5)
    assert run_lockstep([mean_times(None), mean_times(times)]) == [times, times]
    refused = run_lockstep([mean_times(None), mean_times(None)], keep_errors=True)
    assert all(isinstance(error, ProfileMismatchError) for error in refused)
    # and of different orders all take one
    one = BackwardTimes({"c": 0.0, "b": 1.0, "a": 1.0}, 1.0, 5)
    other = BackwardTimes({"c": 0.0, "a": 1.0, "b": 1.0}, 1.0, 5)
    ends = run_lockstep([mean_times(times) for times in (one, other, one)])
    assert ends[0] == ends[1] == ends[2]
    assert all(list(end.backward_seconds) == ["c", "b", "a"] for end in ends)
