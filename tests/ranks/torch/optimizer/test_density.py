"""`density="auto"` under real ranks: one density on all of them, decided with the plan, and nothing lost."""

from __future__ import annotations

import dataclasses

import horovod.torch as stock
import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.cost import Fit, Profile
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import AutoDensity
from horovod_sparse.merging import Plan
from support.dyadic import gradients_for
from support.linear import LinearModel, same_on_all_ranks
from support.optimizers import make, residuals_of, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "wide": (100, 60)}
#: the step after which times decide
DECIDED = 7
LIMITS = AutoDensity(least=0.02, most=0.5, tolerance=0.05)
TEXT = "{}:density=auto(least=0.02,most=0.5,tolerance=0.05)"
gradients = gradients_for(SHAPES)


def profile(seconds_per_byte: float, **changed) -> Profile:
    collectives = {kind: Fit(1e-3, seconds_per_byte) for kind in ("allgather", "allreduce")}
    times, selection = dict.fromkeys(SHAPES, 1e-3), {"topk": Fit(1e-5, 1e-9)}
    made = Profile(stock.size(), "torch", "gloo", 0.001, collectives, selection, {}, times, 1e-3)
    return dataclasses.replace(made, **changed)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("topk", {"merging": "optimal"}, id="topk-optimal", marks=pytest.mark.nightly),
        pytest.param("exdyna", {"groups": 2}, id="exdyna-groups"),
    ],
)
def test_all_ranks_take_one_density_and_lose_nothing(name, arguments, rank, size):
    model = LinearModel(SHAPES)
    optimizer = make(model, TEXT.format(name), **arguments)
    sent = {item: np.zeros(shape) for item, shape in SHAPES.items()}
    given = {item: np.zeros(shape) for item, shape in SHAPES.items()}
    changes = {DECIDED + 1: lambda: optimizer.replan(measure_steps=2)}
    for step in range(DECIDED + 5):
        before = optimizer.plan.density
        found = train_step(model, optimizer, gradients(rank, step))
        asked = optimizer.telemetry.last.density_target
        if step < DECIDED:
            assert 0.019 < asked < 0.022, "the least until times have decided"
        else:
            # where a step ends in new plans, it was taken by the old one
            assert any(asked == pytest.approx(plan, abs=2e-3) for plan in (before, optimizer.plan.density))
        if step >= DECIDED - 1:
            assert optimizer.plan.density in LIMITS.candidates
            assert optimizer.decision.plan == optimizer.plan
            assert f"density {optimizer.plan.density:g}: predicted" in str(optimizer.decision)
            if step >= DECIDED:
                assert optimizer.telemetry.summary().endswith(optimizer.decision.density)
            if arguments.get("groups"):
                assert len(optimizer.plan.buckets) == 2, "the groups stay what they are"
        else:
            assert optimizer.plan.density is None
        changes.get(step, lambda: None)()
        for item in SHAPES:
            sent[item] += found[item].double().numpy()
            given[item] += gradients(rank, step)[item]
        told = stock.allgather_object(optimizer.plan.to_dict())
        assert all(plan == told[0] for plan in told)
    assert same_on_all_ranks(*model.parameters())
    held = residuals_of(optimizer)
    for item in SHAPES:
        both = np.stack([held[item].double().numpy(), given[item]])
        mean, wanted = stock.allreduce(torch.from_numpy(both), name=f"density.{name}.{item}").numpy()
        np.testing.assert_allclose(sent[item] + mean, wanted, atol=1e-4)


@pytest.mark.parametrize(("seconds_per_byte", "density"), [(1e-12, 0.5), (1e-5, 0.02)], ids=["fast", "slow"])
def test_a_profile_decides_at_once(seconds_per_byte, density, rank):
    model = LinearModel(SHAPES)
    optimizer = make(model, TEXT.format("topk"), merging="optimal", profile=profile(seconds_per_byte))
    assert optimizer.plan.density == density
    train_step(model, optimizer, gradients(rank, 0))
    assert optimizer.telemetry.last.density_target == pytest.approx(density, abs=1e-3)
    saved = optimizer.state_dict()
    again = make(LinearModel(SHAPES), TEXT.format("topk"), plan=Plan.from_dict(optimizer.plan.to_dict()))
    assert again.plan == optimizer.plan and again.decision is None, "a plan that says one decides it"
    again.load_state_dict(saved)
    assert all(torch.equal(one, residuals_of(optimizer)[name]) for name, one in residuals_of(again).items())
    by_hand = Plan((("wide", "second", "bias", "first"),))
    optimizer.replan(by_hand)
    assert optimizer.plan == dataclasses.replace(by_hand, density=density), "buckets change, density stays"


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


def test_a_plan_of_another_density_is_refused():
    with pytest.raises(ArgumentError, match=r"a plan for density=0.1"):
        make(LinearModel(SHAPES), "topk:density=0.05", plan=Plan((tuple(SHAPES),), (), 0.1))
