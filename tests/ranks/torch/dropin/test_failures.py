"""What goes wrong does so on every rank, says what to do, and training can go on."""

from __future__ import annotations

import time

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_sparse.errors import NonFiniteGradientError, StateMismatchError, UnsupportedError
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
    held = {name: state["residual"].clone() for name, state in compressor.state_dict()["parameters"].items()}
    gradients = {name: dyadic(SHAPES[name], rank, 2, name) for name in SHAPES}
    if rank == size - 1:
        gradients["second"][17] = np.nan
    # every rank in another order: each must find the same error, whichever gradient it asks for first
    order = sorted(SHAPES, reverse=bool(rank % 2))
    model.backward(gradients, order)
    with pytest.raises(NonFiniteGradientError, match=f"rank {size - 1}: second") as caught:
        optimizer.step()
    assert caught.value.where == {size - 1: "second"}
    state = compressor.state_dict()["parameters"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), "nothing was applied"
        assert not parameter.grad.any()
        assert torch.equal(state[name]["residual"], held[name]), name  # all ranks drop the step's gradients
    optimizer.zero_grad()
    train(model, optimizer, range(3, 6), rank)
    assert same_on_all_ranks(*model.parameters())
    assert not any(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_state_of_another_number_of_ranks_is_refused(rank, size):
    model, optimizer, compressor = make("micro")
    train(model, optimizer, range(2), rank)
    saved = compressor.state_dict()
    for state in saved["parameters"].values():
        state["size"] = size + 1
    with pytest.raises(StateMismatchError, match=f"{size + 1} ranks"):
        compressor.load_state_dict(saved)
    _, optimizer, compressor = make("micro")
    compressor.load_state_dict(saved)  # no bucket yet: found out at the first gradient
    other = LinearModel(SHAPES)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(other.parameters(), lr=0.5), other.named_parameters(), compression=compressor
    )
    with pytest.raises(StateMismatchError, match=f"{size + 1} ranks"):
        other.backward({name: np.ones(SHAPES[name]) for name in SHAPES})
    optimizer._handles.clear()


def test_adasum_is_refused(rank, size):
    if size & (size - 1):
        pytest.skip("Adasum itself wants a power of two")
    model, _optimizer, _ = make(op=hvd.Adasum)  # kept alive: its hooks live as long as it does
    with pytest.raises(UnsupportedError, match="Adasum"):
        model.backward({name: np.ones(SHAPES[name]) for name in SHAPES})


def test_something_that_is_no_gradient_is_refused(rank, size):
    compressor = Compression.topk(density=0.1)
    with pytest.raises(UnsupportedError, match="named_parameters"):
        hvd.allreduce(torch.ones(8), name="x", compression=compressor)
    model = LinearModel(SHAPES)
    compressor = Compression.topk(density=0.1, named_parameters=model.named_parameters())
    with pytest.raises(UnsupportedError, match="no gradient of a parameter"):
        hvd.allreduce(torch.ones(8), name="x", compression=compressor)
    # what has no elements or no fractions is not sparsified
    total = hvd.allreduce(torch.full((3,), 2), name="x", op=hvd.Sum, compression=compressor)
    assert total.tolist() == [2 * size] * 3


def test_one_compressor_for_two_optimizers_is_refused(rank, size):
    first, second = LinearModel(SHAPES), LinearModel(SHAPES)
    shared = Compression.topk(density=0.1)
    for model in (first, second):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            named_parameters=model.named_parameters(),
            compression=shared,
        )
        if model is first:
            train(model, optimizer, range(1), rank)
            continue
        with pytest.raises(UnsupportedError, match="two parameters are called"):
            train(model, optimizer, range(1), rank)


@pytest.mark.controllers
def test_a_failure_of_horovod_leaves_residuals_whole_and_names_free(rank, size):
    """Ranks that disagree about an allreduce get Horovod's error, as elastic training expects it."""
    model, optimizer, compressor = make("randomk", shapes={"first": (40 + 10 * rank, 3)}, density=0.5)
    compressor._agreed_under = present_start()  # else ranks would say so before
    gradient = dyadic((40 + 10 * rank, 3), rank)
    model.backward({"first": gradient})
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()
    assert not compressor._driver.parked
    residual = compressor.state_dict()["parameters"]["first"]["residual"]
    assert torch.equal(residual, torch.from_numpy(gradient.reshape(-1)).float())
    hvd.barrier()
    model, optimizer, _ = make("randomk")  # the same name, in the same way, works again
    train(model, optimizer, range(2), rank)
    assert same_on_all_ranks(*model.parameters())


@pytest.mark.controllers
def test_horovod_may_be_restarted_in_the_middle_of_a_step(rank, size):
    """What was in flight goes back to the residual, and its handles, which Horovod has forgotten, are let go.

    Within one launch Horovod cannot be started again reliably; what hvd.init() does to handles is done here.
    A restart also empties Horovod's queues, which this does not: hence one round, so that no rank can be
    in a second one when the handles are forgotten.
    """
    model, optimizer, compressor = make("topk", op=hvd.Sum)
    train(model, optimizer, range(2), rank)
    held = {n: state["residual"].clone() for n, state in compressor.state_dict()["parameters"].items()}
    interrupted = {name: dyadic(SHAPES[name], rank, 2, name) for name in SHAPES}
    model.backward(interrupted)
    while not all(hvd.poll(handle) for handle in hvd.mpi_ops._handle_map):
        time.sleep(1e-3)
    hvd.mpi_ops._handle_map.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    gradients = {name: dyadic(SHAPES[name], rank, 3, name) for name in SHAPES}
    model.backward(gradients)
    optimizer.synchronize()
    state = compressor.state_dict()["parameters"]
    for name, parameter in model.named_parameters():
        everything = held[name].numpy() + (interrupted[name] + gradients[name]).reshape(-1)
        applied, rest = parameter.grad.reshape(-1).numpy(), state[name]["residual"].numpy()
        total = hvd.allreduce(torch.from_numpy(everything - rest), op=hvd.Sum, name=f"total.{name}")
        np.testing.assert_array_equal(total.numpy(), applied)
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(4, 6), rank)
    assert same_on_all_ranks(*model.parameters())


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_gradients_of_a_closure_are_refused_where_they_would_be_a_ranks_own(kind, rank):
    model = torch.nn.Linear(6, 1)
    optimizer = hvd.DistributedOptimizer(
        kind(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=Compression.topk(density=1.0),
    )

    def closure():
        model.zero_grad()
        loss = model(torch.ones(4, 6)).square().mean()
        loss.backward()
        return loss

    # LBFGS computes them twice, which Horovod itself notices
    error = AssertionError if kind is torch.optim.LBFGS else UnsupportedError
    with pytest.raises(error, match="step"):
        optimizer.step(closure)
