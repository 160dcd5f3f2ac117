"""Steps that are skipped, or done without a bad rank, in the loops of this optimizer: see conformance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import ArgumentError, NonFiniteGradientError, StateMismatchError
from support.dyadic import gradients_for
from support.linear import LinearModel, same_on_all_ranks

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}
BAD = 2
gradients = gradients_for(SHAPES)


def trained(given: Any, compression: str, kind: Any = torch.optim.SGD, **arguments: Any) -> tuple[Any, Any]:
    """A model and its optimizer after the steps whose gradients are given."""
    model = LinearModel(SHAPES)
    made = kind(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(
        made, model.named_parameters(), compression=compression, bucket_bytes=700, **arguments
    )
    for one in given:
        model.backward(one)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(some: Any, others: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def poisoned(rank: int, size: int, value: float = np.nan, steps: int = 5) -> list[dict[str, np.ndarray]]:
    """The last rank's third step has one element of the last bucket that is not finite."""
    given = [gradients(rank, step) for step in range(steps)]
    if rank == size - 1:
        given[BAD]["first"][3, 7] = value
    return given


def test_skip_holds_for_a_step_after_synchronize_and_for_the_next_one_no_more(rank, size):
    given = poisoned(rank, size)
    arguments = {"on_nonfinite": "skip", "max_grad_norm": 1.0}
    model, optimizer = trained(given[:BAD], "topk:density=0.1", torch.optim.Adam, **arguments)
    before = weights(model)
    model.backward(given[BAD])
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        assert optimizer.step() is None
    assert equal(weights(model), before)
    assert [int(state["step"]) for state in optimizer.state.values()] == [BAD] * 3
    optimizer.zero_grad()
    model.backward(given[BAD + 1])
    optimizer.step()
    assert not equal(weights(model), before)


def test_zero_goes_on_where_every_rank_is_bad(rank, size):
    given = [gradients(rank, step) for step in range(4)]
    given[BAD]["bias"][rank] = np.inf
    model, optimizer = trained(given, "exdyna:density=0.1", on_nonfinite="zero")
    assert same_on_all_ranks(*model.parameters())
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert optimizer.telemetry.num_dropped == 1


def test_a_closure_that_cannot_be_skipped_raises(rank, size):
    model, optimizer = trained([gradients(rank, 0)], "topk:density=0.1", on_nonfinite="skip")
    given = poisoned(rank, size)[BAD]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model.loss(given)
        loss.backward()
        return loss

    with pytest.raises(NonFiniteGradientError):
        optimizer.step(closure)


@pytest.mark.controllers
def test_it_is_the_same_on_all_ranks_and_needs_a_sparsifier(rank, size):
    with pytest.raises(ArgumentError, match="on_nonfinite"):
        trained([], hvd.Compression.none, on_nonfinite="skip")
    with pytest.raises(StateMismatchError, match="on_nonfinite differs"):
        trained([gradients(rank, 0)], "topk:density=0.1", on_nonfinite="zero" if rank else "skip")
