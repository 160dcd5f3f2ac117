"""Our DistributedOptimizer: equal to the simulator, to dense training at density 1, and over ranks."""

from __future__ import annotations

import horovod.torch as stock
import numpy as np
import pytest
import torch

from horovod_sparse.merging import Plan
from horovod_sparse.torch import Compression
from support.dyadic import gradients_for
from support.linear import LinearModel, same_on_all_ranks
from support.optimizers import make, residuals_of, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11), "one": (1,)}
gradients = gradients_for(SHAPES)


@pytest.mark.parametrize("bucket_bytes", [680, 1], ids=["three buckets", "layer-wise"])
def test_density_one_equals_stock_dense_training(bucket_bytes, rank, size):
    """Sums are exact, so bits are equal; an average by 3 rounds every rank's value (of at most 4)."""
    for arguments in ({"op": stock.Sum}, {}, {"gradient_predivide_factor": 4.0}):
        steps, weights = [], []
        for dense in (True, False):
            model = LinearModel(SHAPES)
            if dense:
                base = torch.optim.SGD(model.parameters(), lr=0.5)
                optimizer = stock.DistributedOptimizer(base, model.named_parameters(), **arguments)
            else:
                optimizer = make(model, "exdyna:density=1.0", bucket_bytes=bucket_bytes, **arguments)
            steps.append([train_step(model, optimizer, gradients(rank, step)) for step in range(3)])
            weights.append([parameter.detach().clone() for parameter in model.parameters()])
        exact = arguments.get("op") == stock.Sum or size in (1, 2, 4)
        tolerance = 0.0 if exact else 1e-6
        for one, other in zip(*steps, strict=True):
            for name in SHAPES:
                torch.testing.assert_close(other[name], one[name], rtol=0.0, atol=tolerance)
        for one, other in zip(*weights, strict=True):
            torch.testing.assert_close(other, one, rtol=0.0, atol=3 * tolerance)


def test_backward_passes_per_step_accumulate_first(rank):
    results = []
    for passes in (1, 2):
        model = LinearModel(SHAPES)
        optimizer = make(model, "exdyna:density=0.1", backward_passes_per_step=passes, bucket_bytes=680)
        steps = []
        for step in range(4):
            one, two = gradients(rank, 2 * step), gradients(rank, 2 * step + 1)
            if passes == 2:
                model.backward(one)
                steps.append(train_step(model, optimizer, two))
            else:
                steps.append(train_step(model, optimizer, {name: one[name] + two[name] for name in one}))
        results.append(steps)
    for single, double in zip(*results, strict=True):
        for name in SHAPES:
            assert torch.equal(single[name], double[name]), name


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


def test_a_plan_with_dense_parameters(rank, size):
    """Dense ones are averaged exactly; a parameter that becomes dense takes its residual along."""
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1", plan=Plan((("second", "first"),), ("bias", "scalar", "one")))
    found = train_step(model, optimizer, gradients(rank, 0))
    for name in ("bias", "scalar", "one"):
        mean = sum(gradients(r, 0)[name] for r in range(size)) / size
        np.testing.assert_allclose(found[name].numpy(), mean, rtol=3e-7)
    sums = {name: tensor.double() for name, tensor in found.items()}
    optimizer.replan(Plan((("first", "bias"),), ("second", "scalar", "one")))
    for step in (1, 2):
        found = train_step(model, optimizer, gradients(rank, step))
        assert same_on_all_ranks(*found.values())
        for name, tensor in found.items():
            sums[name] += tensor.double()
    held = residuals_of(optimizer)
    assert sorted(held) == ["bias", "first"]
    for name in SHAPES:
        mean = sum(gradients(r, step)[name] for r in range(size) for step in range(3)) / size
        if name in held:
            sums[name] += stock.allreduce(held[name].double(), name=f"held.{name}")
        torch.testing.assert_close(sums[name], torch.tensor(mean), rtol=1e-5, atol=1e-6)
    assert optimizer.telemetry.last.num_union >= SHAPES["first"][0] * 30 // 10
