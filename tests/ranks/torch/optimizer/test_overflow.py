"""Gradients that are finite on every rank, whose sum is not: nobody applies it, and residuals keep them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import NonFiniteSumError
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.optimizers import wrapped

SHAPES = {"first": (40, 30), "bias": (7,)}


@pytest.mark.parametrize("front", ["own", "stock"])
@pytest.mark.parametrize("name", ["exdyna", "micro", "cltk", "gtopk", "oktopk", "topk_dsa"])
def test_nothing_of_it_is_applied(rank, front, name):
    model = LinearModel(SHAPES)
    optimizer = wrapped(front, model, f"{name}:density=0.1")
    for step in range(2):
        model.backward({key: dyadic(shape, rank, step, key) for key, shape in SHAPES.items()})
        optimizer.step()
        optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    given = {key: np.zeros(shape) for key, shape in SHAPES.items()}
    given["first"][3, 7] = 3e38
    model.backward(given)
    with pytest.raises(NonFiniteSumError, match="first"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("front", ["own", "stock"])
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_half_types_hold_less(rank, size, front, op):
    """What the sum is multiplied by counts: an average of numbers that a type holds is held by it."""
    model = LinearModel(SHAPES, torch.float16)
    optimizer = wrapped(front, model, "topk:density=0.1", {"op": getattr(hvd, op)})
    given = {key: np.zeros(shape) for key, shape in SHAPES.items()}
    given["first"][3, 7] = 6e4
    model.backward(given)
    if op == "Sum":
        with pytest.raises(NonFiniteSumError, match="first"):
            optimizer.step()
    else:
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert same_on_all_ranks(*model.parameters())
