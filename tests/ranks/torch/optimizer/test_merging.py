"""Plans made by times, under real ranks: the same on all of them, and nothing lost on the way."""

import horovod.torch as stock
import numpy as np
import torch

import horovod_sparse.torch as hvd
from conformance.engine import Ledger, replicas_agree
from conformance.engines_torch import ENGINES
from horovod_sparse.merging import Plan
from support.dyadic import gradients_for
from support.linear import LinearModel
from support.optimizers import make, residuals_of, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "wide": (100, 60)}
gradients = gradients_for(SHAPES)
OWN = ENGINES[0]


def same_plan(optimizer) -> bool:
    told = stock.allgather_object(optimizer.plan.to_dict())
    return all(plan == told[0] for plan in told)


def test_all_ranks_take_one_plan_by_measured_times_and_lose_nothing(rank, size):
    """Law 1 through a change of the plan by hand, dense to sparse and back."""
    model = LinearModel(SHAPES)
    unused = torch.zeros((), requires_grad=True)

    def loss():  # one rank has no gradient, and measures nothing
        return sum(one.square().sum() for one in model.parameters()) if rank else unused

    profile = hvd.measured_profile(loss, model.named_parameters(), "topk:density=0.05")
    assert len(set(stock.allgather_object(profile.digest()))) == 1, "all ranks have the same measurements"
    arguments = {"merging": "optimal", "tensor_selection": "cost", "profile": profile}
    training, ledger = OWN.train("topk:density=0.05", SHAPES, **arguments), Ledger(OWN)
    optimizer = training.optimizer
    assert optimizer.decision.plan == optimizer.plan
    assert optimizer.decision.predicted_seconds["taken"] > 0.0
    changes = {
        1: lambda: optimizer.replan(Plan((("wide", "second"),), ("bias", "first"))),
        3: lambda: optimizer.replan(Plan((("bias",), ("first", "second")), ("wide",))),
    }
    for step in range(5):
        training.step(gradients(rank, step))
        ledger.enter(gradients(rank, step))
        changes.get(step, lambda: None)()
        assert sorted(optimizer.plan.names()) == sorted(SHAPES)
        assert same_plan(optimizer)
    ledger.balance(training)
    assert replicas_agree(OWN, training)


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
