"""What goes wrong goes wrong on every rank alike, and training can go on."""

from __future__ import annotations

import horovod.torch as stock
import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import NonFiniteSumError, UnsupportedError
from horovod_sparse.torch import Compression
from support.dyadic import gradients_for
from support.linear import LinearModel, same_on_all_ranks
from support.optimizers import make, train_step, wrapped

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11)}
gradients = gradients_for(SHAPES)


def test_adasum_is_refused():
    with pytest.raises(UnsupportedError, match="Adasum"):
        make(LinearModel(SHAPES), Compression.topk(density=0.1), op=stock.Adasum)


def test_a_coo_gradient_is_refused_where_it_appears():
    model = torch.nn.Embedding(5, 2, sparse=True)
    make(model, "topk:density=0.5")
    with pytest.raises(UnsupportedError, match="sparse_as_dense"):
        model(torch.tensor([1])).sum().backward()


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


@pytest.mark.controllers
def test_join_is_an_error_for_those_who_train_on(rank, size):
    """Last in this file: ranks leave it one after the other."""
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1")
    if rank == size - 1:
        model.backward(gradients(rank, 0))
        with pytest.raises(UnsupportedError, match="join"):
            optimizer.step()
    stock.join()
    found = train_step(model, optimizer, gradients(rank, 1))
    assert same_on_all_ranks(*found.values())
