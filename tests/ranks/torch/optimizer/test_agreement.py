"""Ranks that were given different things, or come apart: an error by name on all of them."""

from typing import Any

import horovod.torch as stock
import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse import errors
from support.dyadic import gradients_for
from support.linear import LinearModel, dyadic
from support.optimizers import make, wrapped

TEXT = "topk:density=0.1"
SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}


def test_the_order_of_named_parameters_does_not_matter(rank, size):
    model = LinearModel(SHAPES)
    named = list(model.named_parameters())
    if rank == size - 1:
        named.reverse()
    compression = hvd.Compression.parse("topk:density=1.0")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), named, compression=compression, op=stock.Sum
    )
    model.backward({name: dyadic(shape, rank, name) for name, shape in SHAPES.items()})
    optimizer.step()
    for name, parameter in model.named_parameters():
        total = sum(dyadic(SHAPES[name], r, name) for r in range(size))
        np.testing.assert_allclose(1 - parameter.detach().numpy(), total, atol=1e-5)


def stepped(model: LinearModel, optimizer: Any, rank: int, steps: Any) -> None:
    for step in steps:
        model.backward(gradients_for(SHAPES)(rank, step))
        optimizer.step()
        optimizer.zero_grad()


def test_behind_horovods_own_optimizer_the_environment_asks(rank, size, monkeypatch):
    monkeypatch.setenv("HOROVOD_SPARSE_CHECK_EVERY", "3")
    model = LinearModel(SHAPES)
    optimizer = wrapped("stock", model, "topk:density=0.1")
    stepped(model, optimizer, rank, range(4))
    if rank == size - 1:
        model.second.data[1, 2, 3] += 1e-6
    stepped(model, optimizer, rank, [4])
    with pytest.raises(errors.DriftError, match="after step 6 second differs"):
        stepped(model, optimizer, rank, [5])


def test_what_ranks_begin_or_go_on_with_is_compared_after_the_next_step(rank):
    """By default, long before `check_every` steps: a model that nobody has broadcast, a state of one rank."""
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1")
    if rank:
        model.get_parameter("second").data.add_(1e-3)
    with pytest.raises(errors.DriftError, match="after step 1 second differs"):
        stepped(model, optimizer, rank, [0])
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1")
    stepped(model, optimizer, rank, range(3))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] *= 1 + rank
    optimizer.load_state_dict(saved)
    with pytest.raises(errors.DriftError, match=r"after step 4 .*lr of group 0"):
        stepped(model, optimizer, rank, [3])
