"""The drop-in compressor with one rank: Horovod calls it there in elastic training."""

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


def test_a_step_that_its_optimizer_gives_up_goes_back_to_the_residual():
    """loss.backward(), then load_state_dict() instead of step(), as after a restart."""
    compressor = Compression.topk(density=0.2)
    model, optimizer = make(compressor)
    model.backward(gradients(0))
    with pytest.raises(UnsupportedError, match="between steps"):
        compressor.state_dict()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    hvd.allreduce(torch.zeros(1), name="behind what was given up")
    model.backward(gradients(1))
    optimizer.synchronize()
    saved = compressor.state_dict()["parameters"]
    for name, parameter in model.named_parameters():
        total = parameter.grad.reshape(-1) + saved[name]["residual"]
        np.testing.assert_array_equal(total.numpy(), (gradients(0)[name] + gradients(1)[name]).reshape(-1))


def test_a_bug_in_a_sparsifier_is_raised_and_the_residual_is_whole(monkeypatch):
    compressor = Compression.topk(density=0.2)
    model, optimizer = make(compressor)
    monkeypatch.setattr("horovod_sparse.sparsifiers.base.SparseSum.of", lambda messages: 1 / 0)
    model.backward(gradients(0))
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    monkeypatch.undo()
    residual = compressor.state_dict()["parameters"]["first"]["residual"]
    np.testing.assert_array_equal(residual.numpy(), gradients(0)["first"].reshape(-1))


def test_a_damaged_state_is_refused_by_the_path_of_its_field_and_changes_nothing():
    model, optimizer = make(made := Compression.exdyna(density=0.2))
    for step in range(2):
        model.backward(gradients(step))
        optimizer.step()
    saved = made.state_dict()
    one = saved["parameters"]["first"]
    wrong: dict[str, object] = {
        r"\['first'\].residual": one | {"residual": one["residual"] * float("nan")},
        r"\['first'\].companions": {key: value for key, value in one.items() if key != "companions"},
        r"\['first'\].size": one | {"size": "two"},
        r"\['first'\].learning_rate": one | {"learning_rate": [0.5]},
        r"\['first'\].sparsifier": one | {"sparsifier": None},
        r"\['first'\] is": [one],
    }
    for path, damaged in wrong.items():
        with pytest.raises(StateMismatchError, match=path):
            made.load_state_dict(saved | {"parameters": saved["parameters"] | {"first": damaged}})
    nested: object = []
    for _ in range(3000):
        nested = [nested]
    for damaged in (None, [], {}, saved | {"parameters": 3}, saved | {"parameters": nested}):
        with pytest.raises(StateMismatchError):
            made.load_state_dict(damaged)
    for name, kept in made.state_dict()["parameters"].items():
        assert torch.equal(kept["residual"], saved["parameters"][name]["residual"])
