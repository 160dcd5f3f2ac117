"""Our DistributedOptimizer, and Horovod's with our compressor: equal to dense training at density 1."""

from __future__ import annotations

import horovod.torch as stock
import numpy as np
import pytest
import torch

from horovod_sparse.feedback import parse_recipe
from horovod_sparse.merging import Plan
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.torch import Compression
from support.dyadic import gradients_for
from support.linear import LinearModel
from support.optimizers import make, train_step, wrapped

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11), "one": (1,)}
gradients = gradients_for(SHAPES)
pytestmark = pytest.mark.filterwarnings("ignore:Parameter `num_groups`:DeprecationWarning")


FRONTS = {
    "three buckets": ("own", lambda model: {"bucket_bytes": 680}),
    "layer-wise": ("own", lambda model: {"bucket_bytes": 1}),
    "stock": ("stock", lambda model: {}),
    "stock, num_groups": ("stock", lambda model: {"num_groups": 2}),
    "stock, lists": ("stock", lambda model: {"groups": [[model.first, model.bias], [model.second]]}),
}


def made(name, compression, **arguments):
    front, more = FRONTS[name]
    model = LinearModel(SHAPES)
    return model, wrapped(front, model, compression, more(model) | arguments)


@pytest.mark.parametrize("name", FRONTS)
def test_density_one_equals_stock_dense_training(name, rank, size):
    """Sums are exact, so bits are equal; an average by 3 rounds every rank's value (of at most 4)."""
    for arguments in ({"op": stock.Sum}, {}, {"gradient_predivide_factor": 4.0}):
        if "," in name and "gradient_predivide_factor" in arguments:
            continue  # Horovod's grouped path ignores the factor
        steps, weights = [], []
        for pair in (made("stock", "none", **arguments), made(name, "exdyna:density=1.0", **arguments)):
            steps.append([train_step(*pair, gradients(rank, step)) for step in range(3)])
            weights.append([parameter.detach().clone() for parameter in pair[0].parameters()])
        exact = arguments.get("op") == stock.Sum or size in (1, 2, 4)
        tolerance = 0.0 if exact else 1e-6
        for one, other in zip(*steps, strict=True):
            for key in SHAPES:
                torch.testing.assert_close(other[key], one[key], rtol=0.0, atol=tolerance)
        for one, other in zip(*weights, strict=True):
            torch.testing.assert_close(other, one, rtol=0.0, atol=3 * tolerance)


@pytest.mark.parametrize("name", ["three buckets", "stock", "stock, num_groups"])
def test_backward_passes_per_step_accumulate_first(name, rank):
    """Two passes are one gradient: what a single pass with their sum gives."""
    single, double = (made(name, "exdyna:density=0.1", backward_passes_per_step=n) for n in (1, 2))
    for step in range(4):
        one, two = gradients(rank, 2 * step), gradients(rank, 2 * step + 1)
        double[0].backward(one)
        found = train_step(*double, two)
        wanted = train_step(*single, {key: one[key] + two[key] for key in one})
        assert all(torch.equal(found[key], wanted[key]) for key in SHAPES)


def test_the_learning_rate_of_the_group_reaches_the_feedback(rank, size):
    """Behind Horovod's own optimizer: when the rate halves, residuals double, as the simulator's do."""
    sums = {}
    for scaled in ("true", "false"):
        text = f"topk:density=0.1,feedback=error(scale_residual={scaled})"
        model, optimizer = made("stock", text, op=stock.Sum)
        cluster = SimulatedCluster(parse_recipe(text), 1200, size, name="first")
        for step, rate in enumerate([0.5, 0.25, 0.25]):
            optimizer.param_groups[0]["lr"] = rate
            sums[scaled] = train_step(model, optimizer, gradients(rank, step))["first"].reshape(-1)
            inputs = [gradients(r, step)["first"].reshape(-1).astype(np.float32) for r in range(size)]
            np.testing.assert_array_equal(sums[scaled].numpy(), cluster.step(inputs, rate))
    assert not torch.equal(sums["true"], sums["false"])


def test_groups_and_plans_make_the_buckets_they_name(rank, size):
    """However a bucket is asked for, it does the same."""
    names = [("one",), ("second",), ("scalar", "first"), ("bias",)]
    results = []
    for kind in ("groups", "plan"):
        model = LinearModel(SHAPES)
        arguments = {
            "groups": {"groups": [[model.first, model.scalar], [model.bias]]},
            "plan": {"plan": Plan(tuple(names))},
        }[kind]
        optimizer = make(model, Compression.topk(density=0.1), **arguments)
        assert optimizer.plan == Plan(tuple(names))
        results.append([train_step(model, optimizer, gradients(rank, step)) for step in range(3)])
    for one, other in zip(*results, strict=True):
        for name in SHAPES:
            assert torch.equal(one[name], other[name])
    model = LinearModel(SHAPES)
    assert [len(b) for b in make(model, "topk", groups=2).plan.buckets] == [3, 2]
