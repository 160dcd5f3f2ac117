"""What goes wrong goes wrong on every rank alike, and training can go on."""

from __future__ import annotations

import horovod.torch as stock
import numpy as np
import pytest
import torch

from horovod_sparse.errors import NonFiniteGradientError, StateMismatchError, UnsupportedError
from horovod_sparse.merging import Plan
from horovod_sparse.torch import Compression
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.optimizers import make, residuals_of, train_step

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11)}


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    return {name: dyadic(shape, rank, step, name) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("algorithm", ["topk", "exdyna", "randomk"])
@pytest.mark.parametrize("where", ["second", "bias"])
def test_a_bad_gradient_on_one_rank_stops_the_step_on_all(algorithm, bad, where, rank, size):
    """Nothing is applied; other ranks' gradients are held back, and the bad one is dropped as a whole."""
    model = LinearModel(SHAPES)
    optimizer = make(model, f"{algorithm}:density=0.1", bucket_bytes=700, op=stock.Sum)
    assert len(optimizer.plan.buckets) == 2
    sick = size - 1
    applied = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(5):
        given = gradients(rank, step)
        if step == 2:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            if rank == sick:
                given[where].reshape(-1)[3] = bad
            model.backward(given)
            with pytest.raises(NonFiniteGradientError, match=f"rank {sick}: {where}"):
                optimizer.step()
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            assert not any(parameter.grad.count_nonzero() for parameter in model.parameters())
            optimizer.zero_grad()
            continue
        found = train_step(model, optimizer, given)
        assert same_on_all_ranks(*found.values())
        for name in SHAPES:
            applied[name] += found[name]
    for name, values in residuals_of(optimizer).items():
        total = sum(gradients(r, step)[name] for r in range(size) for step in range(5))
        total = total - gradients(sick, 2)[name]
        held = stock.allreduce(values, op=stock.Sum, name=f"held.{name}").reshape(SHAPES[name])
        torch.testing.assert_close(applied[name] + held, torch.tensor(total, dtype=torch.float32))
    assert optimizer.telemetry.last.step == 4


def test_a_bad_dense_parameter_names_its_rank(rank, size):
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1", plan=Plan((("second", "first"),), ("bias", "scalar")))
    given = gradients(rank, 0)
    if rank == 0:
        given["bias"][2] = np.nan
    model.backward(given)
    with pytest.raises(NonFiniteGradientError, match="rank 0: bias"):
        optimizer.step()
    found = train_step(model, optimizer, gradients(rank, 1))
    expected = sum(gradients(r, 1)["bias"] for r in range(size)) / size
    np.testing.assert_allclose(found["bias"].numpy(), expected, rtol=3e-7)


def test_adasum_is_refused():
    with pytest.raises(UnsupportedError, match="Adasum"):
        make(LinearModel(SHAPES), Compression.topk(density=0.1), op=stock.Adasum)


def test_a_coo_gradient_is_refused_where_it_appears():
    model = torch.nn.Embedding(5, 2, sparse=True)
    make(model, "topk:density=0.5")
    with pytest.raises(UnsupportedError, match="sparse_as_dense"):
        model(torch.tensor([1])).sum().backward()


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


@pytest.mark.parametrize("algorithm", ["topk", "exdyna", "gtopk", "randomk"])
def test_a_rank_that_is_a_step_behind_is_met_on_all(algorithm, rank, size):
    """As one that gave up a step alone, by an error of its own that the loop has caught."""
    model = LinearModel(SHAPES)
    optimizer = make(model, f"{algorithm}:density=0.1")
    for step in range(4):
        train_step(model, optimizer, gradients(rank, step))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if rank == size - 1:
        for part in optimizer._synchronizer.sparse:
            part.bucket.state.step -= 1
    model.backward(gradients(rank, 4))
    words = rf"modulo 8, ranks \[0.*\] at 4, ranks \[{size - 1}\] at 3"
    if algorithm == "exdyna":  # has noticed that parts meet, before it looks at steps
        words = "in one another's parts in the same step"
    with pytest.raises(StateMismatchError, match=words):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
