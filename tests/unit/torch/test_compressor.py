"""The drop-in compressor with one rank: Horovod calls it there in elastic training."""

import copy

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_sparse.errors import StateMismatchError, UnsupportedError
from horovod_sparse.torch import Compression
from support.linear import LinearModel, dyadic

SHAPES = {"first": (6, 5), "second": (11,)}


@pytest.fixture(autouse=True)
def elastic(monkeypatch, memory):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    hvd.init()


def make(compressor, dtype=torch.float32, **arguments):
    model = LinearModel(SHAPES, dtype)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        named_parameters=model.named_parameters(),
        compression=compressor,
        **arguments,
    )
    return model, optimizer


def gradients(step):
    return {name: dyadic(shape, step, name) for name, shape in SHAPES.items()}


def trained(optimizer, model, steps):
    for step in steps:
        model.backward(gradients(step))
        optimizer.step()
        optimizer.zero_grad()


def test_a_bug_in_a_sparsifier_is_raised_and_the_residual_is_whole(monkeypatch):
    compressor = Compression.topk(density=0.2)
    model, optimizer = make(compressor)
    monkeypatch.setattr("horovod_sparse.sparsifiers.base.SparseSum.of", lambda messages: 1 / 0)
    model.backward(gradients(0))
    with pytest.raises(UnsupportedError, match="between steps"):
        compressor.state_dict()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    monkeypatch.undo()
    residual = compressor.state_dict()["residuals"]["first"]
    np.testing.assert_array_equal(residual.numpy(), gradients(0)["first"])


@pytest.mark.parametrize("text", ["exdyna:density=0.2", "dgc:density=0.2,feedback=momentum"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loaded_state_goes_on_bit_for_bit(text, when):
    model, optimizer = make(compressor := Compression.parse(text))
    trained(optimizer, model, range(3))
    old, weights = copy.deepcopy(compressor.state_dict()), copy.deepcopy(model.state_dict())
    trained(optimizer, model, range(3, 6))
    other = Compression.parse(text)
    if when == "before":
        other.load_state_dict(old)
    again, optimizer = make(other)
    if when == "after":
        other.load_state_dict(old)
    again.load_state_dict(weights)
    trained(optimizer, again, range(3, 6))
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert other.telemetry.last.step == 6


def test_a_damaged_state_is_refused_and_changes_nothing():
    model, optimizer = make(made := Compression.exdyna(density=0.2))
    trained(optimizer, model, range(2))
    entry = made.state_dict()
    nested: object = []
    for _ in range(3000):
        nested = [nested]
    broken = entry["residuals"] | {"first": entry["residuals"]["first"] * float("nan")}
    for damaged in ([], {"parameters": {}}, entry | {"buckets": nested}, entry | {"residuals": broken}):
        with pytest.raises(StateMismatchError):
            made.load_state_dict(damaged)
    for name, kept in made.state_dict()["residuals"].items():
        assert torch.equal(kept, entry["residuals"][name])
