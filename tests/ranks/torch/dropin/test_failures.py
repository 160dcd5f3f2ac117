"""What goes wrong does so on every rank, says what to do, and training can go on."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_sparse.errors import NonFiniteGradientError, UnsupportedError
from horovod_sparse.torch import Compression
from horovod_sparse.torch._horovod import present_start
from support.linear import LinearModel, dyadic, same_on_all_ranks

SHAPES = {"first": (40, 3), "second": (50,), "third": (9, 2)}


def make(text: str = "topk", shapes=SHAPES, density: float = 0.1, **arguments):
    model = LinearModel(shapes)
    compressor = Compression.parse(f"{text}{',' if ':' in text else ':'}density={density}")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        named_parameters=model.named_parameters(),
        compression=compressor,
        **arguments,
    )
    return model, optimizer, compressor


def train(model, optimizer, steps, rank) -> None:
    for step in steps:
        model.backward({name: dyadic(SHAPES[name], rank, step, name) for name in SHAPES})
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("text", ["exdyna", "randomk:shared=False"])
def test_what_is_not_finite_raises_on_every_rank_in_groups(text, rank, size):
    model, optimizer, compressor = make(text, op=hvd.Sum, groups=2)
    train(model, optimizer, range(2), rank)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    held = {name: one.clone() for name, one in compressor.state_dict()["residuals"].items()}
    gradients = {name: dyadic(SHAPES[name], rank, 2, name) for name in SHAPES}
    if rank == size - 1:
        gradients["second"][17] = np.nan
    # every rank in another order: each must find the same error, whichever gradient it asks for first
    order = sorted(SHAPES, reverse=bool(rank % 2))
    model.backward(gradients, order)
    with pytest.raises(NonFiniteGradientError, match=f"rank {size - 1}: second") as caught:
        optimizer.step()
    assert caught.value.where == {size - 1: "second"}
    state = compressor.state_dict()["residuals"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), "nothing was applied"
        assert not parameter.grad.any()
        assert torch.equal(state[name], held[name]), name  # all ranks drop the step's gradients
    optimizer.zero_grad()
    train(model, optimizer, range(3, 6), rank)
    assert same_on_all_ranks(*model.parameters())
    assert not any(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_adasum_is_refused(rank, size):
    if size & (size - 1):
        pytest.skip("Adasum itself wants a power of two")
    model, _optimizer, _ = make(op=hvd.Adasum)  # kept alive: its hooks live as long as it does
    with pytest.raises(UnsupportedError, match="Adasum"):
        model.backward({name: np.ones(SHAPES[name]) for name in SHAPES})


def test_something_that_is_no_gradient_is_refused(rank, size):
    compressor = Compression.topk(density=0.1)
    with pytest.raises(UnsupportedError, match="no gradient that a sparsifier"):
        hvd.allreduce(torch.ones(8), name="x", compression=compressor)
    # what has no elements or no fractions is not sparsified
    total = hvd.allreduce(torch.full((3,), 2), name="x", op=hvd.Sum, compression=compressor)
    assert total.tolist() == [2 * size] * 3


def test_one_compressor_for_two_optimizers_is_refused(rank, size):
    model, optimizer, shared = make()
    train(model, optimizer, range(1), rank)
    again = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), compression=shared
    )
    train(model, again, range(1, 2), rank)  # of the same parameters: it takes the place of the first
    with pytest.raises(UnsupportedError, match=r"belongs to the optimizer of .*first"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(LinearModel(SHAPES).parameters(), lr=0.5), compression=shared
        )


@pytest.mark.controllers
def test_a_failure_of_horovod_leaves_residuals_whole_and_names_free(rank, size):
    """Ranks that disagree about an allreduce get Horovod's error, as elastic training expects it."""
    model, optimizer, compressor = make("randomk", shapes={"first": (40 + 10 * rank, 3)}, density=0.5)
    optimizer._synchronizer._agreed_under = present_start()  # else ranks would say so before
    gradient = dyadic((40 + 10 * rank, 3), rank)
    model.backward({"first": gradient})
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()
    assert not optimizer._synchronizer.driver.parked
    assert torch.equal(compressor.state_dict()["residuals"]["first"], torch.from_numpy(gradient).float())
    hvd.barrier()
    model, optimizer, _ = make("randomk")  # the same name, in the same way, works again
    train(model, optimizer, range(2), rank)
    assert same_on_all_ranks(*model.parameters())


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_closures_see_synchronized_gradients(kind, rank):
    model = LinearModel({"weight": (6,)})
    optimizer = hvd.DistributedOptimizer(
        kind(model.parameters(), lr=0.1), model.named_parameters(), compression=Compression.topk(density=1.0)
    )

    def closure():
        model.zero_grad()
        loss = (model.weight * (rank + 1)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert same_on_all_ranks(*model.parameters())
    assert (model.weight != 1).all()
