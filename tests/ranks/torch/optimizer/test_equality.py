"""Our DistributedOptimizer, and Horovod's with our compressor: equal to dense training."""

import horovod.torch as stock
import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.merging import Plan
from support.dyadic import gradients_for
from support.linear import LinearModel
from support.optimizers import make, train_step, wrapped

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11), "one": (1,)}
gradients = gradients_for(SHAPES)
pytestmark = pytest.mark.filterwarnings("ignore:Parameter `num_groups`:DeprecationWarning")


FRONTS = {
    "three buckets": ("own", {"bucket_bytes": 680}),
    "stock": ("stock", {}),
    "stock, num_groups": ("stock", {"num_groups": 2}),
}


def made(name, compression, **arguments):
    front, more = FRONTS[name]
    model = LinearModel(SHAPES)
    return model, wrapped(front, model, compression, more | arguments)


@pytest.mark.parametrize("name", FRONTS)
def test_backward_passes_per_step_accumulate_first(name, rank):
    """Two passes are one gradient: what a single pass with their sum gives."""
    single, double = (made(name, "exdyna:density=0.1", backward_passes_per_step=n) for n in (1, 2))
    for step in range(4):
        one, two = gradients(rank, 2 * step), gradients(rank, 2 * step + 1)
        double[0].backward(one)
        found = train_step(*double, two)
        wanted = train_step(*single, {key: one[key] + two[key] for key in one})
        assert all(torch.equal(found[key], wanted[key]) for key in SHAPES)


def test_groups_make_the_buckets_they_name():
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1", groups=[[model.first, model.scalar], [model.bias]])
    assert optimizer.plan == Plan((("one",), ("second",), ("scalar", "first"), ("bias",)))
    model = LinearModel(SHAPES)
    assert [len(b) for b in make(model, "topk", groups=2).plan.buckets] == [3, 2]


@pytest.mark.parametrize("named", [True, False])
def test_two_networks_of_the_same_names_are_under_way_at_once(named, rank, size):
    """As where one is trained through the other: backward reaches both before either steps."""
    models, optimizers = [LinearModel(SHAPES), LinearModel(SHAPES)], {}
    for which in (0, 1) if rank % 2 else (1, 0):  # made in different orders, too
        optimizers[which] = hvd.DistributedOptimizer(
            torch.optim.SGD(models[which].parameters(), lr=0.5),
            models[which].named_parameters() if named else None,
            compression="topk:density=1.0",
            op=stock.Sum,
        )
    for step in range(3):
        for which in (0, 1) if rank % 2 else (1, 0):
            models[which].backward(gradients(rank, 10 * which + step))
        for which in (0, 1):
            optimizers[which].step()
            expected = sum(gradients(r, 10 * which + step)["first"] for r in range(size))
            np.testing.assert_array_equal(models[which].first.grad.numpy(), expected)
            optimizers[which].zero_grad()
