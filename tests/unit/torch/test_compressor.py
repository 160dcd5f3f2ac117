"""The drop-in compressor with one rank: Horovod calls it there in elastic training."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_sparse.errors import NonFiniteGradientError, StateMismatchError, UnsupportedError
from horovod_sparse.pytorch.parameter_buckets import NamedParameters
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


def test_the_gradient_stays_where_it_is():
    model, optimizer = make(Compression.topk(density=0.2))
    model.backward(gradients(0))
    tensors = {
        name: (parameter.grad, parameter.grad.data_ptr()) for name, parameter in model.named_parameters()
    }
    for name, (tensor, _) in tensors.items():  # readable until its sum is there
        np.testing.assert_array_equal(tensor.numpy(), gradients(0)[name])
    optimizer.synchronize()
    for name, parameter in model.named_parameters():
        assert parameter.grad is tensors[name][0] and parameter.grad.data_ptr() == tensors[name][1]
        kept = max(1, round(0.2 * parameter.numel()))
        assert parameter.grad.count_nonzero() == kept
        expected = gradients(0)[name].reshape(-1)
        where = np.argsort(-np.abs(expected), kind="stable")[:kept]
        np.testing.assert_array_equal(parameter.grad.reshape(-1).numpy()[where], expected[where])


def test_a_gradient_with_gaps_between_its_elements():
    """Not contiguous: stock Horovod refuses such a gradient, here its logical order counts."""
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    compressor = Compression.topk(density=1.0, named_parameters=[("w", parameter)])
    given = torch.from_numpy(dyadic((6, 4), "gaps")).float().t()
    assert not given.is_contiguous()
    expected = given.clone(memory_format=torch.contiguous_format)
    parameter.grad = given
    dummy, context = compressor.compress(parameter.grad)
    parameter.grad.set_(compressor.decompress(dummy, context))
    assert torch.equal(parameter.grad, expected)


def test_dummies_scale_the_sum():
    """Whatever Horovod makes of the 1 that it gets is what becomes of the sum."""
    parameter = torch.nn.Parameter(torch.zeros(5))
    compressor = Compression.topk(density=1.0, named_parameters=[("w", parameter)])
    parameter.grad = torch.arange(5.0)
    dummy, context = compressor.compress(parameter.grad)
    assert dummy.tolist() == [1.0] and parameter.grad.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    dummy *= 0.25
    assert compressor.decompress(dummy, context).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    "tensor", [torch.zeros(0), torch.ones(3, dtype=torch.int64), torch.eye(3).to_sparse()]
)
def test_what_is_not_sparsified_passes_through(tensor):
    compressor = Compression.topk(density=0.1)
    same, context = compressor.compress(tensor)
    assert same is tensor and context is None
    assert compressor.decompress(tensor, None) is tensor


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


def test_not_finite_leaves_the_optimizer_ready():
    model, optimizer = make(Compression.micro(density=0.2), backward_passes_per_step=2)
    for bad in (False, True, False):
        for part in range(2):
            given = gradients(part)
            if bad and part:
                given["second"][3] = np.nan
            model.backward(given)
        if bad:
            with pytest.raises(NonFiniteGradientError, match="second"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_saved_state_is_plain_and_resumes(dtype, tmp_path):
    straight, straight_optimizer = make(Compression.exdyna(density=0.2), dtype)
    compressor = Compression.exdyna(density=0.2)
    model, optimizer = make(compressor, dtype)
    for step in range(6):
        straight.backward(gradients(step))
        straight_optimizer.step()
        straight_optimizer.zero_grad()
        if step == 3:
            torch.save(compressor.state_dict(), tmp_path / "state")
            weights = model.state_dict()
            compressor = Compression.exdyna(density=0.2)
            model, optimizer = make(compressor, dtype)
            model.load_state_dict(weights)
            compressor.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        model.backward(gradients(step))
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), model.parameters(), strict=True))


def test_state_of_something_else_is_refused():
    compressor = Compression.exdyna(density=0.2)
    model, optimizer = make(compressor)
    model.backward(gradients(0))
    optimizer.step()
    saved = compressor.state_dict()
    with pytest.raises(StateMismatchError, match="exdyna"):
        Compression.topk(density=0.2).load_state_dict(saved)
    with pytest.raises(StateMismatchError, match="first"):
        Compression.exdyna(named_parameters=[("other", torch.zeros(1))]).load_state_dict(saved)
    saved["parameters"]["first"]["residual"] = torch.zeros(3)
    before = compressor.state_dict()["parameters"]["second"]["residual"]
    with pytest.raises(StateMismatchError, match="3 elements"):
        compressor.load_state_dict(saved)
    assert torch.equal(compressor.state_dict()["parameters"]["second"]["residual"], before)


def test_accelerators_are_refused_by_name():
    parameter = torch.nn.Parameter(torch.zeros(3, device="meta"))
    parameter.grad = torch.zeros(3, device="meta")
    compressor = Compression.topk(density=0.2, named_parameters=[("w", parameter)])
    with pytest.raises(UnsupportedError, match="w is on meta"):
        compressor.compress(parameter.grad)


def test_owners_are_found_in_any_order():
    parameters = [(f"p{i}", torch.nn.Parameter(torch.zeros(1))) for i in range(20)]
    named = NamedParameters(parameters)
    generator = np.random.default_rng(0)
    for order in (range(20), reversed(range(20)), generator.permutation(20), generator.permutation(20)):
        for i in order:
            parameters[i][1].grad = torch.zeros(1)
        for i in generator.permutation(20):
            assert named.owner(parameters[i][1].grad) == parameters[i]
    assert named.owner(torch.zeros(1)) is None


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
