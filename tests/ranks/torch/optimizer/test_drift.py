"""Ranks that come apart from the beginning, behind Horovod's own optimizer, and among some of them."""

from typing import Any

import pytest

from horovod_sparse.errors import DriftError
from support.dyadic import gradients_for
from support.linear import LinearModel
from support.optimizers import make, wrapped

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}
gradients = gradients_for(SHAPES)


def stepped(model: LinearModel, optimizer: Any, rank: int, steps: Any) -> None:
    for step in steps:
        model.backward(gradients(rank, step))
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
    with pytest.raises(DriftError, match="after step 6 second differs"):
        stepped(model, optimizer, rank, [5])


def test_what_ranks_begin_or_go_on_with_is_compared_after_the_next_step(rank):
    """By default, long before `check_every` steps: a model that nobody has broadcast, a state of one rank."""
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1")
    if rank:
        model.get_parameter("second").data.add_(1e-3)
    with pytest.raises(DriftError, match="after step 1 second differs"):
        stepped(model, optimizer, rank, [0])
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1")
    stepped(model, optimizer, rank, range(3))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] *= 1 + rank
    optimizer.load_state_dict(saved)
    with pytest.raises(DriftError, match=r"after step 4 .*lr of group 0"):
        stepped(model, optimizer, rank, [3])
