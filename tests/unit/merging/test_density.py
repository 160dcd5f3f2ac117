"""The largest density for nothing: against trying all densities, and all plans, in the model."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from horovod_sparse.cost import AlphaBeta, assumed_profile
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import AutoDensity, parse_recipe, recipe
from horovod_sparse.frontend.compression import describe_recipe
from horovod_sparse.merging import (
    Kept,
    ParameterFacts,
    Plan,
    Workload,
    densest_plan,
    fixed,
    optimal,
    predict,
    single,
)
from horovod_sparse.sparsifiers import ALGORITHMS
from support.merging_models import all_plans

#: five layers, the first ones (last in backward) small
FACTS = tuple(
    ParameterFacts(f"l{i}", n) for i, n in enumerate((2_000, 40_000, 700_000, 2_000_000, 4_000_000))
)
STEP = Workload(FACTS, (2e-3, 3e-3, 6e-3, 9e-3, 5e-3), 8e-3)


def searched(name: str, limits: AutoDensity, bandwidth: float, strategy, fuse: bool = False):
    """The choice, and what predicts an iteration at a density."""
    profile = assumed_profile(AlphaBeta(5e-5, 8.0 / bandwidth), 4)

    def cost(density):
        return profile.cost(ALGORITHMS[name](density=density), fuse_sparse=fuse)

    def seconds(plan, density):
        return predict(STEP, plan, cost(density)).iteration_seconds

    return densest_plan(limits, lambda density: strategy(STEP, cost(density)), seconds), seconds


@pytest.mark.parametrize("fuse", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("bandwidth", [2e8, 1e9, 1e10, 1e12], ids=["0.2", "1", "10", "1000"])
@pytest.mark.parametrize("name", ["topk", "exdyna", "spardl"])
def test_no_larger_density_does_under_any_plan(name, bandwidth, fuse):
    """Exhaustive: every candidate with each of the 16 plans that merge neighbours."""
    limits = AutoDensity(least=0.001, most=0.2)
    choice, seconds = searched(name, limits, bandwidth, optimal, fuse)
    plans = list(all_plans(STEP))
    assert len(plans) == 16
    fastest = {density: min(seconds(plan, density) for plan in plans) for density in limits.candidates}
    allowed = fastest[limits.least] * (1 + limits.tolerance)
    assert choice.density == max(
        density for density, least in fastest.items() if least <= allowed * (1 + 1e-9)
    )
    assert choice.seconds == pytest.approx(fastest[choice.density])
    assert choice.least_seconds == pytest.approx(fastest[limits.least])
    assert f"density {choice.density:g}" in choice.reason


def test_fast_networks_give_all_and_slow_ones_the_least():
    limits = AutoDensity(least=0.01, most=0.1, tolerance=0.0)
    assert searched("topk", limits, 1e13, single)[0].density < 0.1, "the last bucket hides behind nothing"
    slow, _ = searched("topk", limits, 1e6, single)
    assert slow.density == 0.01 and "more than 0% longer" in slow.reason
    fast, _ = searched("topk", AutoDensity(least=0.01, most=0.1), 1e13, single)
    assert fast.density == 0.1 and fast.plan.density == 0.1
    assert "no more than 0.1 was asked for" in fast.reason


def test_a_plan_met_at_another_density_is_tried_at_all():
    """Bisection alone would end at 0.01: there a better plan is found that does at 0.1, too."""
    found = {0.01: Plan((("a",), ("b",)))}
    worse = Plan((("a", "b"),))

    def seconds(plan, density):
        return 1.0 if plan == found[0.01] or density < 0.012 else 2.0

    limits = AutoDensity(least=0.009, most=0.1)
    choice = densest_plan(limits, lambda density: found.get(density, found[0.01]), seconds)
    assert choice.density == 0.1
    assert densest_plan(limits, lambda density: worse, seconds).density < 0.012


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if ALGORITHMS[name].follows_density])
def test_every_sparsifier_takes_it_and_tells_it(name):
    text = f"{name}:density=auto(least=0.002,most=0.05)"
    made = parse_recipe(text)
    assert made.auto == AutoDensity(0.002, 0.05) and made.sparsifier.density == 0.002
    assert parse_recipe(made.describe()) == made
    assert recipe(name, density=AutoDensity(0.002, 0.05)) == made
    chosen = made.at(0.03)
    assert chosen.sparsifier.density == 0.03 and chosen.describe() == made.describe()
    assert chosen.for_parameter("weight", 1000).sparsifier.density == 0.03
    assert "density='auto'" in describe_recipe(recipe(name, density="auto"))


def test_what_is_not_allowed_is_named():
    with pytest.raises(ArgumentError, match=r"density='atuo'.*'auto'"):
        recipe("topk", density="atuo")
    with pytest.raises(ArgumentError, match="no density decides what hard_threshold sends"):
        recipe("hard_threshold", density="auto")
    with pytest.raises(ArgumentError, match=r"most=0\.001"):
        AutoDensity(least=0.01, most=0.001)
    with pytest.raises(ArgumentError, match="tolerance"):
        AutoDensity(tolerance=-1.0)
    with pytest.raises(ArgumentError, match="least"):
        AutoDensity(least=0.0)
    with pytest.raises(UnsupportedError, match=r"nowhere does not take: give a number"):
        recipe("topk", density="auto").refuse_auto("nowhere")
    with pytest.raises(ArgumentError, match=r"a plan for density=0.5.*density=0.01"):
        recipe("topk", density=0.01).at(0.5)
    with pytest.raises(ArgumentError, match=r"plan\.density"):
        Plan((("a",),), density=0.0)


@pytest.mark.parametrize("limits", [AutoDensity(), AutoDensity(1e-5, 1.0), AutoDensity(0.5, 0.5)])
def test_candidates_ascend_from_limit_to_limit(limits):
    candidates = limits.candidates
    assert candidates[0] == limits.least and candidates[-1] == limits.most
    assert all(a < b <= 1.2 * a for a, b in itertools.pairwise(candidates))


def test_plans_carry_it_through_json():
    plan = Plan((("a",),), ("b",), 0.02)
    assert Plan.from_dict(plan.to_dict()) == plan and str(plan).endswith("density 0.02")
    assert "density" not in Plan((("a",),)).to_dict(), "as plans have been written so far"


def test_buckets_that_are_given_stay():
    plan = Plan((("l4", "l3"), ("l1",)), ("l0",))
    kept = Kept(plan)(STEP)
    assert kept.buckets[:2] == plan.buckets and kept.dense == ("l0",)
    assert kept.buckets[2:] == (("l2",),), "of what the plan does not know"
    assert Kept(fixed(bytes=100)(STEP))(STEP) == fixed(bytes=100)(STEP)


def test_limits_of_numpy_s_are_plain_numbers() -> None:
    """As JSON, rank 0 failed with them alone, and the others waited for it."""
    limits = AutoDensity(least=np.float32(0.001), most=np.float64(0.1), tolerance=np.float32(0.05))
    assert json.dumps([limits.candidates, limits.tolerance])
    assert json.dumps(Plan((), (), density=np.float32(0.5)).to_dict())
    with pytest.raises(ArgumentError, match="least"):
        AutoDensity(least=5e-324)
