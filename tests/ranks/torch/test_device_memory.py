"""Several ranks whose gradients are served as if GPUs held them: the host's bits, for every algorithm."""

from __future__ import annotations

import dataclasses

import horovod.torch as stock
import numpy as np
import pytest
import torch

from horovod_sparse.errors import NonFiniteGradientError
from horovod_sparse.torch import SparseCompressor
from support.cases import CASES, Case, case_id
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.memories import choose_memory
from support.optimizers import make, residuals_of, train_step

pytestmark = pytest.mark.once

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11)}
#: one row of every algorithm
FIRST = list({case.recipe.sparsifier.name: case for case in reversed(CASES)}.values())


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    return {name: dyadic(shape, rank, step, name) for name, shape in SHAPES.items()}


def sparse(recipe, model):
    return make(model, SparseCompressor(recipe), bucket_bytes=680)


def behind_horovods(recipe, model):
    return stock.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        named_parameters=model.named_parameters(),
        compression=SparseCompressor(recipe),
    )


def trainings():
    """Every algorithm in buckets; behind Horovod's optimizer those of one round, of several, of exchanges."""
    yield from ((sparse, case) for case in FIRST)
    for case in FIRST:
        if case.recipe.sparsifier.name in ("topk", "exdyna", "gtopk"):
            yield behind_horovods, case


@pytest.mark.parametrize(
    ("wrap", "case"), list(trainings()), ids=lambda it: case_id(it) if isinstance(it, Case) else it.__name__
)
def test_the_same_bits(wrap, case, rank, monkeypatch):
    recipe = case.at(0.1)
    if wrap is sparse:
        rules = dataclasses.replace(recipe.rules, dense_below=8)
        recipe = dataclasses.replace(recipe, rules=rules)
    steps, weights = [], []
    for name in ("host", "device"):
        choose_memory(monkeypatch, name)
        model = LinearModel(SHAPES)
        optimizer = wrap(recipe, model)
        steps.append([train_step(model, optimizer, gradients(rank, step)) for step in range(4)])
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        if wrap is sparse:
            held = residuals_of(optimizer)
            weights[-1] += [held[key] for key in sorted(held)]
    for one, other in zip(*steps, strict=True):
        for name in SHAPES:
            assert torch.equal(one[name], other[name]), name
    assert all(map(torch.equal, *weights))
    assert same_on_all_ranks(*steps[1][-1].values())


@pytest.mark.parametrize("where", ["first", "bias"])
def test_all_ranks_refuse_what_is_not_finite_on_one(where, rank, size, monkeypatch):
    choose_memory(monkeypatch, "device")
    model = LinearModel(SHAPES)
    optimizer = make(model, "exdyna:density=0.1,dense_below=8")
    given = gradients(rank, 0)
    if rank == size - 1:
        given[where].reshape(-1)[5] = np.nan
    model.backward(given)
    with pytest.raises(NonFiniteGradientError, match=where) as error:
        optimizer.step()
    assert list(error.value.where) == [size - 1]
    train_step(model, optimizer, gradients(rank, 1))
    assert same_on_all_ranks(*(parameter.detach() for parameter in model.parameters()))
