"""Plans by times with two levels: the bucket's time is that of both, and "auto" and the command agree."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from horovod_sparse.cli.main import main
from horovod_sparse.cost import AlphaBeta, Fit, assumed_cost, assumed_profile, choose_levels
from horovod_sparse.feedback import AutoDensity
from horovod_sparse.frontend.calibration import Extent, Where
from horovod_sparse.frontend.calibration.backward_times import BackwardTimes
from horovod_sparse.frontend.correction import corrected, measured_step
from horovod_sparse.frontend.decision import decide, first_plan, levels_by_plan, plan_by_times
from horovod_sparse.frontend.levels import by_cost
from horovod_sparse.frontend.plan_request import plan_request
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.sparsifiers import SparDL, TopK
from horovod_sparse.topology import Topology
from support.merging_models import all_plans, seconds

TOPK = TopK(density=0.01)
SIZES = (40_000, 100, 300_000, 20_000, 5_000, 90_000, 700, 250_000, 60_000)
FACTS = [ParameterFacts(f"p{number}", size) for number, size in enumerate(SIZES)]
HOSTS = Topology.regular(2, 2)
SELECTION = Fit(1e-4, 1e-9)
SLOW, FAST = AlphaBeta(1e-4, 8e-9), AlphaBeta(2e-5, 2.5e-10)


def profile_of(seed=0, between=SLOW, inside=FAST, selection=SELECTION, **changed):
    """A complete profile of 2 x 2 ranks, as if it were measured."""
    random = np.random.default_rng(seed)
    made = assumed_profile(between, 4, per_host=2, host_network=inside, selection=selection)
    times = {fact.name: float(each) for fact, each in zip(FACTS, random.exponential(2e-4, 9), strict=True)}
    return dataclasses.replace(
        made, framework="torch", controller="gloo", backward_seconds=times, forward_seconds=1e-3, **changed
    )


def where(levels="host", rank=0):
    return Where(rank, 4, "torch", "gloo", 1e-3, topology=HOSTS if levels == "host" else None)


def asked(**arguments):
    return plan_request(**arguments)[0]


@pytest.mark.parametrize("merging", ["optimal", "omgs", "joint"])
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_held_against_all_plans_in_the_model_of_two_levels(merging, seed):
    profile = profile_of(seed, between=AlphaBeta(3e-4, 8e-9))
    made = plan_by_times(asked(merging=merging), where(), FACTS, TOPK, profile)
    workload, cost = measured_step(profile, FACTS, TOPK, 4, HOSTS)
    fused = dataclasses.replace(cost, fuse_sparse=False)  # what `optimal` proves is without
    best = min(seconds(workload, plan, fused) for plan in all_plans(workload))
    taken = seconds(workload.with_dense(made.plan.dense), made.plan, fused)
    if merging == "optimal":
        assert taken == pytest.approx(best)
    assert taken <= 1.2 * best, "the flat model's plan is further off"
    assert made.predicted_seconds["taken"] == pytest.approx(
        seconds(workload.with_dense(made.plan.dense), made.plan, cost)
    )


def test_what_a_message_costs_within_hosts_merges_buckets():
    """All that is slow is the start of a message within a host: a plan with one level knows nothing of it."""
    profile = profile_of(between=AlphaBeta(0.0, 1e-10), inside=AlphaBeta(5e-2, 0.0), selection=Fit(0.0, 1e-9))
    two, one = (
        plan_by_times(asked(merging="optimal"), where(levels), FACTS, TOPK, profile).plan
        for levels in ("host", "flat")
    )
    assert len(two.buckets) == 1 < len(one.buckets)


def test_what_stays_dense_is_decided_by_both_levels():
    """Eq. (1), tensor by tensor: messages within hosts are of all elements."""
    profile = profile_of(between=AlphaBeta(1e-5, 8e-9), inside=AlphaBeta(1e-3, 1e-9))
    wanted = asked(merging="layerwise", tensor_selection="cost")
    dense = {
        levels: set(plan_by_times(wanted, where(levels), FACTS, TOPK, profile).plan.dense)
        for levels in ("host", "flat")
    }
    cost = profile.cost(TOPK, levels="host")
    for fact in FACTS:
        n = fact.num_elements
        sparse = cost.selection.seconds(n) + cost.communication.seconds(n)
        assert (fact.name in dense["host"]) == (sparse >= cost.dense.seconds(4 * n)), fact
    assert dense["flat"] < dense["host"] < {fact.name for fact in FACTS}


def test_a_density_is_chosen_by_both_levels():
    """What a density costs is sent between hosts by half as many ranks, so more of it is for nothing."""
    profile = profile_of(selection=Fit(1e-4, 0.0))
    wanted = asked(merging="single", density=AutoDensity(tolerance=0.1))
    found = [
        plan_by_times(wanted, where(levels), FACTS, TopK(density=0.001), profile).plan.density
        for levels in ("host", "flat")
    ]
    assert found[0] > 1.5 * found[1]


def test_the_warm_up_measures_both_levels_and_all_ranks_take_one_plan():
    extent = Extent((64, 1024, 4096), (1000, 2000, 4000), repetitions=1, budget_seconds=1e9)
    times = BackwardTimes(dict.fromkeys([fact.name for fact in reversed(FACTS)], 1e-4), 1e-3, 5)
    ranks = [
        decide(asked(merging="optimal"), where(rank=rank), FACTS, TOPK, times, extent=extent)
        for rank in range(4)
    ]
    found = run_lockstep(ranks, topology=HOSTS)
    assert all(one.plan == found[0].plan for one in found)
    profile = found[0].profile
    assert profile.per_host == 2 and set(profile.levels["host"]) == {"reducescatter", "allgather"}
    again = plan_by_times(asked(merging="optimal"), where(), FACTS, TOPK, profile)
    assert again.plan == found[0].plan and again.predicted_seconds == dict(found[0].predicted_seconds)


def test_an_iteration_with_two_levels_is_corrected_by_their_model():
    profile, current = profile_of(), Plan((tuple(fact.name for fact in reversed(FACTS)),))
    longer = BackwardTimes({}, 0.0, 5, (), 0.5)
    found = corrected(profile, longer, current, FACTS, TOPK, 4, True, HOSTS)
    workload, cost = measured_step(found, FACTS, TOPK, 4, HOSTS)
    assert seconds(workload, current, cost) == pytest.approx(0.5)
    flat = corrected(profile, longer, current, FACTS, TOPK, 4, True)
    assert flat.forward_seconds != found.forward_seconds


def test_auto_takes_the_levels_of_the_shorter_iteration(tmp_path):
    """Communication that is hidden costs nothing: as one bucket two levels may win, as iterations lose."""
    table = tmp_path / "model.json"
    seen = set()
    for between, inside in ((1e-8, 1e-9), (8e-8, 1e-9), (8e-8, 3e-8)):
        profile = profile_of(between=AlphaBeta(1e-5, between), inside=AlphaBeta(1e-5, inside))
        request = asked(merging="optimal", profile=profile)
        taken = {
            levels: plan_by_times(request, where(levels), FACTS, TOPK, profile).predicted_seconds["taken"]
            for levels in ("flat", "host")
        }
        choice = by_cost(TOPK, FACTS, request)(2, 2)
        assert choice.levels == min(taken, key=lambda levels: taken[levels])
        assert (choice.flat_seconds, choice.host_seconds) == (taken["flat"], taken["host"])
        assert "an iteration" in choice.reason and "by the profile" in choice.reason
        together = choose_levels(TOPK, sum(SIZES), 2, 2, profile=profile).levels
        seen.add((choice.levels, together))
        profile.save(tmp_path / "profile.json")
        told = tmp_path / "plan.json"
        model = {
            "parameters": [
                [fact.name, fact.num_elements, profile.backward_seconds[fact.name]] for fact in FACTS
            ]
        }
        table.write_text(json.dumps({**model, "forward_seconds": profile.forward_seconds}))
        words = ["--profile", str(tmp_path / "profile.json"), "--sparsifier", "topk:density=0.01"]
        assert main(["plan", "--model", str(table), *words, "--json", str(told)]) == 0
        answer = json.loads(told.read_text())
        assert answer["levels"] == choice.levels
        assert answer["compared"][0]["iteration_seconds"] == pytest.approx(taken[choice.levels])
        assert answer["compared"][1]["iteration_seconds"] == pytest.approx(max(taken.values()))
    assert seen == {("flat", "host"), ("host", "host"), ("flat", "flat")}


def test_what_cannot_be_compared_stays_flat():
    profile = profile_of()
    wanted = asked(merging="optimal", profile=profile)
    assert levels_by_plan(wanted, profile, FACTS, TOPK, 4, 1).levels == "flat"
    teams = SparDL(teams=4, density=0.01)
    told = by_cost(teams, FACTS, asked(merging="optimal", profile=profile))(2, 2)
    assert told.levels == "flat" and "cannot be used among 2 hosts" in told.reason
    without = dataclasses.replace(profile, selection={})
    told = by_cost(TOPK, FACTS, asked(merging="optimal", profile=without))(2, 2)
    assert told.levels == "flat" and "no selection time for topk" in told.reason


def test_by_formulas_a_bucket_of_two_levels_pays_for_three_rounds(monkeypatch):
    one, two = (assumed_cost(TOPK, 8, one_host=False, per_host=per_host) for per_host in (1, 2))
    assert two.communication.fixed_seconds > 2.5 * one.communication.fixed_seconds
    pairs = assumed_cost(TOPK, 8, one_host=False, per_host=2, on_mpi=True)
    assert pairs.communication.fixed_seconds < one.communication.fixed_seconds, "no cycle is waited for"
    assert two.selection.seconds(10**6) < one.selection.seconds(10**6)
    assert two.dense == one.dense
    # and so a bucket that wins with one level may stay dense with two
    monkeypatch.delenv("HOROVOD_SPARSE_TENSOR_SELECTION", raising=False)
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    fact = ParameterFacts("a", 40_000)
    found = [
        first_plan(None, {"a": (fact, fact)}, TOPK, lambda levels=levels: where(levels)).plan
        for levels in ("flat", "host")
    ]
    assert found == [Plan((("a",),)), Plan((), ("a",))]
