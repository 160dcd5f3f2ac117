"""Plans made by times, under real ranks: the same plan at the same step, and nothing lost on the way."""

from __future__ import annotations

import dataclasses

import horovod.torch as stock
import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from conformance.engine import Ledger, replicas_agree
from conformance.engines_torch import ENGINES
from horovod_sparse.cost import Fit
from horovod_sparse.errors import ArgumentError, ProfileMismatchError
from horovod_sparse.feedback import AutoDensity
from horovod_sparse.merging import Plan
from support.dyadic import gradients_for
from support.linear import LinearModel, same_on_all_ranks
from support.merging_models import profile_of_two
from support.optimizers import make, residuals_of, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "wide": (100, 60)}
#: the step after which the plan changes
DECIDED = 7
LIMITS = AutoDensity(least=0.02, most=0.5, tolerance=0.05)
AUTO = "{}:density=auto(least=0.02,most=0.5,tolerance=0.05)"
gradients = gradients_for(SHAPES)
OWN = ENGINES[0]


def profile(**changed):
    made = profile_of_two({"topk": Fit(1e-5, 1e-9)}, dict.fromkeys(SHAPES, 1e-3), 1e-3)
    return dataclasses.replace(made, **{"size": stock.size(), **changed})


def same_plan(optimizer) -> bool:
    told = stock.allgather_object(optimizer.plan.to_dict())
    return all(plan == told[0] for plan in told)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        pytest.param("topk:density=0.05", {"merging": "optimal", "tensor_selection": "cost"}, id="optimal"),
        pytest.param(AUTO.format("exdyna"), {"groups": 2}, id="auto-groups"),
        pytest.param(AUTO.format("topk"), {"merging": "optimal"}, id="auto", marks=pytest.mark.nightly),
    ],
)
def test_all_ranks_change_to_one_plan_and_lose_nothing(text, arguments, rank, size):
    """Law 1 through the warm-up, two changes by times and two by hand, dense to sparse and back."""
    training, ledger = OWN.train(text, SHAPES, **arguments), Ledger(OWN)
    optimizer = training.optimizer
    default, auto = optimizer.plan, "auto" in text
    changes = {
        DECIDED + 1: lambda: optimizer.replan(Plan((("wide", "second"),), ("bias", "first"))),
        DECIDED + 2: lambda: optimizer.replan(Plan((("bias",), ("first", "second")), ("wide",))),
        DECIDED + 3: lambda: optimizer.replan(measure_steps=2),
        DECIDED + 6: lambda: optimizer.replan(),
    }
    for step in range(DECIDED + 8):
        before = optimizer.plan
        training.step(gradients(rank, step))
        ledger.enter(gradients(rank, step))
        if step < DECIDED - 1:
            assert optimizer.plan == default
            assert optimizer.decision is None
        elif step == DECIDED - 1:
            assert optimizer.decision.plan == optimizer.plan
            assert optimizer.decision.predicted_seconds["taken"] > 0.0
        if auto and step >= DECIDED:
            assert optimizer.plan.density in LIMITS.candidates
            if not before.dense:  # where a step ends in new plans, it was taken by the old one
                assert optimizer.telemetry.last.density_target == pytest.approx(before.density, abs=2e-3)
        elif auto:
            assert 0.019 < optimizer.telemetry.last.density_target < 0.022, "the least until times decide"
        changes.get(step, lambda: None)()
        assert sorted(optimizer.plan.names()) == sorted(SHAPES)
        assert same_plan(optimizer)
    ledger.balance(training)
    assert replicas_agree(OWN, training)
    everyone = stock.allgather_object(optimizer.decision.profile.digest())
    assert len(set(everyone)) == 1, "all ranks have the same measurements"


@pytest.mark.parametrize(("seconds_per_byte", "density"), [(1e-12, 0.5), (1e-5, 0.02)], ids=["fast", "slow"])
def test_a_profile_decides_about_density_at_once(seconds_per_byte, density, rank):
    model = LinearModel(SHAPES)
    given = profile(collectives=dict.fromkeys(("allgather", "allreduce"), Fit(1e-3, seconds_per_byte)))
    optimizer = make(model, AUTO.format("topk"), merging="optimal", profile=given)
    assert optimizer.plan.density == density
    train_step(model, optimizer, gradients(rank, 0))
    assert optimizer.telemetry.last.density_target == pytest.approx(density, abs=1e-3)
    assert optimizer.telemetry.summary().endswith(optimizer.decision.density)
    saved = optimizer.state_dict()
    again = make(LinearModel(SHAPES), AUTO.format("topk"), plan=Plan.from_dict(optimizer.plan.to_dict()))
    assert again.plan == optimizer.plan and again.decision is None, "a plan that says one decides it"
    again.load_state_dict(saved)
    assert all(torch.equal(one, residuals_of(optimizer)[name]) for name, one in residuals_of(again).items())
    by_hand = Plan((("wide", "second", "bias", "first"),))
    optimizer.replan(by_hand)
    assert optimizer.plan == dataclasses.replace(by_hand, density=density), "buckets change, density stays"
    with pytest.raises(ArgumentError, match=r"a plan for density=0.1"):
        make(LinearModel(SHAPES), "topk:density=0.05", plan=Plan((tuple(SHAPES),), (), 0.1))


@pytest.mark.nightly
def test_behind_horovods_own_optimizer_a_density_is_decided_too(rank):
    model = LinearModel(SHAPES)
    optimizer = stock.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        model.named_parameters(),
        compression=hvd.Compression.topk(density="auto"),
    )
    for step in range(12):
        train_step(model, optimizer, gradients(rank, step))
    assert 0.001 <= optimizer.plan.density <= 0.1
    assert optimizer.decision.plan == optimizer.plan and len(optimizer.plan.buckets) == len(SHAPES)
    assert same_on_all_ranks(*model.parameters())


def test_a_small_model_of_which_nothing_is_said_trains_densely(rank, monkeypatch):
    """As with Horovod's own optimizer, bit for bit. Who asks for all to be sparsified gets that."""
    monkeypatch.delenv("HOROVOD_SPARSE_TENSOR_SELECTION")
    models = [LinearModel(SHAPES) for _ in range(3)]
    careless = make(models[0], "exdyna:density=0.05")
    asked = make(models[1], "exdyna:density=0.05", tensor_selection="all")
    dense = make(models[2], "none")
    for step in range(3):
        for model, optimizer in zip(models, (careless, asked, dense), strict=True):
            train_step(model, optimizer, gradients(rank, step))
    assert careless.plan.buckets == ()
    assert sorted(careless.plan.dense) == sorted(SHAPES)
    assert "this model is too small to gain from exdyna" in careless.telemetry.summary()
    assert asked.plan.dense == ()
    for mine, theirs in zip(models[0].parameters(), models[2].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert not residuals_of(careless) or not any(np.any(held) for held in residuals_of(careless).values())


def refused_by_all(make_it, match):
    with pytest.raises(ProfileMismatchError, match=match):
        make_it()
    assert stock.allreduce(torch.ones(1), op=stock.Sum, name="still here").item() == stock.size()


def test_ranks_with_different_profiles_are_refused_on_all(rank, tmp_path):
    def of(given, merging="optimal"):
        model = LinearModel(SHAPES)
        optimizer = make(model, "topk:density=0.05", merging=merging, profile=given)
        return lambda: train_step(model, optimizer, gradients(rank, 0))

    refused_by_all(of(profile(cycle_seconds=0.001 * (1 + rank))), "loaded another profile")
    path = tmp_path / f"profile{rank}.json"
    if rank == 0:
        profile().save(path)
    refused_by_all(of(path), "rank 1 cannot read its profile")
    refused_by_all(of(None, None if rank else "single"), "rank 0 asks for merging=single")
    refused_by_all(of(profile(size=1)), "1 rank")
    # after the warm-up, too: only rank 0 plans, and all end
    model = LinearModel(SHAPES)
    optimizer = make(
        model, "topk:density=0.05", merging="optimal", profile=profile(selection={}, backward_seconds={})
    )
    for step in range(DECIDED - 1):
        train_step(model, optimizer, gradients(rank, step))
    refused_by_all(
        lambda: train_step(model, optimizer, gradients(rank, DECIDED)), "no selection time for topk"
    )


@pytest.mark.controllers
def test_a_rank_without_any_gradient_does_not_stop_the_others(rank):
    """Its hooks never fire, so it has measured nothing; it decides at the same step all the same."""
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.05", merging="optimal")
    for step in range(DECIDED):
        if rank == 0:
            optimizer.step()
            optimizer.zero_grad()
        else:
            train_step(model, optimizer, gradients(rank, step))
    assert optimizer.decision is not None
    assert same_plan(optimizer)
