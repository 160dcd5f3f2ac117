"""Loss scaling in loops that conformance/pytorch.py has not, and steps that are skipped."""

from typing import Any

import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from conformance.engine import SHAPES, given, run
from conformance.engines_torch import ENGINES
from horovod_sparse.errors import ArgumentError, NonFiniteGradientError
from horovod_sparse.tensors.loss_scale import scaled_by, watch_scalers
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.optimizers import make, train_step

OWN = ENGINES[0]


def backward(model, given, scaler=None):
    loss = model.loss(given)
    (loss if scaler is None else scaler.scale(loss)).backward()


def own(model, text, **arguments):
    return make(model, text, bucket_bytes=700, **arguments)


@pytest.mark.parametrize("later", ["scaled", "plain"])
def test_a_rank_without_gradients_takes_part_after_a_step_that_its_scaler_skipped(later, rank):
    model, other = LinearModel(SHAPES), LinearModel({"other": (3,)})
    optimizer = own(model, "topk:density=1.0")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        mine = given(rank, step)
        if step == 1:
            mine["second"].reshape(-1)[3] = torch.inf
        used = scaler if step < 2 or later == "scaled" else None
        if step in (0, 2) and rank:
            backward(other, {"other": dyadic((3,), rank, step, "other")}, used)
        else:
            backward(model, mine, used)
        if used is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 512.0
    assert optimizer.telemetry.last.step == 3
    assert same_on_all_ranks(*model.parameters())


def test_a_scaled_backward_pass_that_fails_leaves_no_scale_behind():
    def fail(gradient):
        raise MemoryError

    layer = torch.nn.Linear(2, 1)
    layer.weight.register_hook(fail)
    scaler = torch.amp.GradScaler("cpu")
    watch_scalers()
    with pytest.raises(MemoryError):
        scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
    assert scaled_by() is None


def poisoned(rank: int, size: int) -> dict[str, np.ndarray]:
    """The last rank has one element that is not finite."""
    gradients = given(rank, 2)
    if rank == size - 1:
        gradients["first"][3, 7] = np.nan
    return gradients


def test_skip_holds_for_a_step_after_synchronize_and_for_the_next_one_no_more(rank, size):
    model = LinearModel(SHAPES)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.5),
        model.named_parameters(),
        "topk:density=0.1",
        on_nonfinite="skip",
        max_grad_norm=1.0,
    )
    for step in range(2):
        train_step(model, optimizer, given(rank, step))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.backward(poisoned(rank, size))
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        assert optimizer.step() is None
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    assert [int(state["step"]) for state in optimizer.state.values()] == [2] * len(before)
    optimizer.zero_grad()
    train_step(model, optimizer, given(rank, 3))
    assert not all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_a_closure_that_cannot_be_skipped_raises_and_so_does_dense_training(rank, size):
    for argument in ({"on_nonfinite": "skip"}, {"check_every": 3}):
        with pytest.raises(ArgumentError, match=next(iter(argument))):
            make(LinearModel(SHAPES), "none", **argument)
    training = OWN.train("topk:density=0.1", on_nonfinite="skip")
    run(training, OWN, range(2))

    def closure() -> Any:
        training.optimizer.zero_grad()
        loss = training.loss(poisoned(rank, size))
        loss.backward()
        return loss

    with pytest.raises(NonFiniteGradientError):
        training.optimizer.step(closure)
