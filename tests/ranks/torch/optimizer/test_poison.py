"""Steps that are skipped, or done without a bad rank, in the loops of this optimizer: see conformance."""

from typing import Any

import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from conformance.engine import SHAPES, given, run
from conformance.engines_torch import ENGINES
from horovod_sparse.errors import ArgumentError, NonFiniteGradientError
from support.linear import LinearModel
from support.optimizers import make, train_step

OWN = ENGINES[0]


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
