"""Plans made by times, under real ranks: the same plan at the same step, and nothing lost on the way."""

import horovod.torch as stock
import numpy as np
import pytest
import torch

from conformance.engine import Ledger, replicas_agree
from conformance.engines_torch import ENGINES
from horovod_sparse.merging import Plan
from support.dyadic import gradients_for
from support.linear import LinearModel
from support.optimizers import make, residuals_of, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "wide": (100, 60)}
#: the step after which the plan changes
DECIDED = 7
gradients = gradients_for(SHAPES)
OWN = ENGINES[0]


def same_plan(optimizer) -> bool:
    told = stock.allgather_object(optimizer.plan.to_dict())
    return all(plan == told[0] for plan in told)


def test_all_ranks_change_to_one_plan_and_lose_nothing(rank, size):
    """Law 1 through the warm-up, two changes by times and two by hand, dense to sparse and back."""
    arguments = {"merging": "optimal", "tensor_selection": "cost"}
    training, ledger = OWN.train("topk:density=0.05", SHAPES, **arguments), Ledger(OWN)
    optimizer = training.optimizer
    default = optimizer.plan
    changes = {
        DECIDED + 1: lambda: optimizer.replan(Plan((("wide", "second"),), ("bias", "first"))),
        DECIDED + 2: lambda: optimizer.replan(Plan((("bias",), ("first", "second")), ("wide",))),
        DECIDED + 3: lambda: optimizer.replan(measure_steps=2),
        DECIDED + 6: lambda: optimizer.replan(),
    }
    for step in range(DECIDED + 8):
        training.step(gradients(rank, step))
        ledger.enter(gradients(rank, step))
        if step < DECIDED - 1:
            assert optimizer.plan == default
            assert optimizer.decision is None
        elif step == DECIDED - 1:
            assert optimizer.decision.plan == optimizer.plan
            assert optimizer.decision.predicted_seconds["taken"] > 0.0
        changes.get(step, lambda: None)()
        assert sorted(optimizer.plan.names()) == sorted(SHAPES)
        assert same_plan(optimizer)
    ledger.balance(training)
    assert replicas_agree(OWN, training)
    everyone = stock.allgather_object(optimizer.decision.profile.digest())
    assert len(set(everyone)) == 1, "all ranks have the same measurements"


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
    assert "elements stay dense" in careless.telemetry.summary()
    assert asked.plan.dense == ()
    for mine, theirs in zip(models[0].parameters(), models[2].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert not residuals_of(careless) or not any(np.any(held) for held in residuals_of(careless).values())


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
