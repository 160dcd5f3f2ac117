"""Plans by times with two levels: the bucket's time is that of both, and "auto" and the command agree."""

import dataclasses
import json

import numpy as np
import pytest

from horovod_sparse.cli.main import main
from horovod_sparse.cost import AlphaBeta, Fit, assumed_profile, choose_levels
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.planning import by_cost, plan_request
from horovod_sparse.planning.calibration import Extent
from horovod_sparse.planning.calibration.steps import BackwardTimes, measured_step
from horovod_sparse.planning.request import plan_by_times
from horovod_sparse.planning.warmup import decide
from horovod_sparse.plans.dense import ClusterFacts, bucket_seconds
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.sparsifiers import TopK
from horovod_sparse.topology import Topology
from horovod_sparse.training.first_plan import first_plan
from support.merging_models import all_plans, seconds
from support.sampling import rows_by

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
    return ClusterFacts(rank, 4, "torch", "gloo", 1e-3, topology=HOSTS if levels == "host" else None)


def asked(**arguments):
    return plan_request(**arguments)[0]


@rows_by("merging,seed", ["optimal", "omgs", "joint"], range(3))
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


def test_by_formulas_a_bucket_of_two_levels_pays_for_three_rounds(monkeypatch):
    def seconds(topology=None, controller="gloo", n=1000):
        cluster = ClusterFacts(0, 8, "torch", controller, topology=topology)
        return bucket_seconds(TOPK, cluster, n, 4 * n)

    hosts = Topology.regular(4, 2)
    assert seconds(hosts)[1] > 2.5 * seconds()[1]
    assert seconds(hosts, "mpi")[1] < seconds()[1], "no cycle is waited for"
    assert seconds(hosts, n=10**6)[0] < seconds(n=10**6)[0]
    assert seconds(hosts)[2] == seconds()[2]
    # and so a bucket that wins with one level may stay dense with two
    monkeypatch.delenv("HOROVOD_SPARSE_TENSOR_SELECTION", raising=False)
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    fact = ParameterFacts("a", 40_000)
    found = [
        first_plan(None, {"a": (fact, fact)}, TOPK, lambda levels=levels: where(levels)).plan
        for levels in ("flat", "host")
    ]
    assert found == [Plan((("a",),)), Plan((), ("a",))]
