"""Making optimizers needs no other rank; the first step is where ranks agree."""

from __future__ import annotations

import horovod.torch as stock
import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from support.dyadic import gradients_for
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.optimizers import make, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}
gradients = gradients_for(SHAPES)


def test_one_made_on_one_rank_alone_holds_up_nobody(rank, size):
    if rank == 0:
        alone = make(LinearModel(SHAPES), "topk:density=0.1")
        assert alone.plan is not None
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1")
    for step in range(3):
        found = train_step(model, optimizer, gradients(rank, step))
        assert same_on_all_ranks(*found.values())
    assert same_on_all_ranks(*model.parameters())


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


def test_dense_and_sparse_training_in_turn(rank):
    """Every optimizer is still there when the next one is made, with its hooks."""
    model, plain, kept = LinearModel(SHAPES), LinearModel(SHAPES), []
    dense = stock.DistributedOptimizer(torch.optim.SGD(plain.parameters(), lr=0.5), plain.named_parameters())
    for turn, text in enumerate(["none", "topk:density=1.0", "none", "topk:density=1.0"]):
        own = torch.optim.SGD(model.parameters(), lr=0.5)
        kept.append(hvd.DistributedOptimizer(own, model.named_parameters(), hvd.Compression.parse(text)))
        for step in range(2):
            for one, optimizer in ((model, kept[-1]), (plain, dense)):
                one.backward(
                    {name: dyadic(shape, rank, 2 * turn + step, name) for name, shape in SHAPES.items()}
                )
                optimizer.step()
                optimizer.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert same_on_all_ranks(*model.parameters())


def test_lbfgs_with_a_loss_of_each_ranks_own(rank, size):
    """It stops by the loss: by losses of their own, ranks would stop at different evaluations."""
    data = torch.randn(16, 6, generator=torch.Generator().manual_seed(rank))
    weights = []
    for averaged in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe"),
            named_parameters=model.named_parameters(),
            compression=hvd.Compression.topk(density=1.0),
        )

        def closure(model=model, optimizer=optimizer, averaged=averaged):
            optimizer.zero_grad()
            # the ranks' losses differ by orders of magnitude
            loss = (model(data) - data.sum(1, keepdim=True)).pow(4).mean() * 10.0**rank
            loss.backward()
            return stock.allreduce(loss.detach(), name="loss") if averaged else loss

        first = float(optimizer.step(closure))
        last = float(optimizer.step(closure))
        assert last < 0.1 * first
        assert same_on_all_ranks(*model.parameters())
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
