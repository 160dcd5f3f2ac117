"""The memories behind the PyTorch front end give the same bits, and refuse devices that cannot serve."""

from types import SimpleNamespace

import horovod.torch as stock
import numpy as np
import pytest
import torch

from horovod_sparse.errors import NonFiniteGradientError, UnsupportedError
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.tensors.device_memory import DeviceMemory
from horovod_sparse.tensors.driver import Task
from horovod_sparse.tensors.flat_gradient import GradientMemory, memory_of
from horovod_sparse.tensors.parts import DenseParameters
from horovod_sparse.torch import SparseCompressor
from horovod_sparse.training.engine import carry_out
from support.linear import LinearModel, dyadic
from support.memories import choose_memory
from support.optimizers import make, train_step
from support.sampling import rows_by

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "scalar": ()}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def gradients(step):
    return {name: dyadic(shape, step, name) for name, shape in SHAPES.items()}


def test_a_device_that_holds_nothing_is_refused():
    with pytest.raises(UnsupportedError, match=r"the gradient of w is on meta.*Train on the CPU"):
        memory_of(torch.device("meta"), "w")


@rows_by("dtype,scale", DTYPES, [1.0, 0.5, 1 / 3])
def test_scaled_sums_have_the_same_bits(dtype, scale, monkeypatch):
    generator = np.random.default_rng(3)
    indices = generator.integers(0, 500, 300).astype(np.int32)
    kind = np.float64 if dtype == torch.float64 else np.float32
    values = generator.standard_normal(300).astype(kind)
    indices[:2], values[:2] = 7, (1.5, -1.5)  # cancels, unless drawn again
    found = []
    for name in ("host", "device"):
        choose_memory(monkeypatch, name)
        gradient = torch.zeros(20, 25, dtype=dtype)
        count = memory_of(gradient.device, "w").write(gradient, indices, values, scale)
        assert count == np.unique(indices).size
        found.append(gradient.view(torch.int64 if dtype == torch.float64 else torch.int16))
    assert torch.equal(*found)


def trained(optimizer_of, dtype=torch.float32, steps=5):
    """Synchronized gradients of all steps, weights, and the checkpoint."""
    model = LinearModel(SHAPES, dtype)
    optimizer, state = optimizer_of(model)
    found = [train_step(model, optimizer, gradients(step)) for step in range(steps)]
    return found, {name: p.detach().clone() for name, p in model.named_parameters()}, state()


def ours(text, **arguments):
    def wrap(model):
        optimizer = make(model, text, **arguments)
        return optimizer, lambda: optimizer.state_dict()["horovod_sparse"]

    return wrap


def theirs(text):
    def wrap(model):
        compressor = SparseCompressor(parse_recipe(text))
        optimizer = stock.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            named_parameters=model.named_parameters(),
            compression=compressor,
        )
        return optimizer, compressor.state_dict

    return wrap


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


@pytest.mark.parametrize("way", [ours("dgc:density=0.1,feedback=momentum"), theirs("dgc:density=0.1")])
def test_a_checkpoint_of_one_memory_continues_in_the_other(way, monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    stock.init()
    ends = []
    for first, second in [("host", "host"), ("host", "device"), ("device", "host")]:
        choose_memory(monkeypatch, first)
        _, weights, saved = trained(way)
        choose_memory(monkeypatch, second)
        model = LinearModel(SHAPES)
        model.load_state_dict(weights)
        optimizer, state = way(model)
        if "plan" in saved:
            optimizer.load_state_dict({**optimizer.state_dict(), "horovod_sparse": saved})
        else:
            optimizer._compression.load_state_dict(saved)
        ends.append(([train_step(model, optimizer, gradients(step)) for step in range(5, 8)], state()))
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


@pytest.mark.parametrize("where", ["first", "bias"])
def test_not_finite_is_refused_and_dropped_whole(where, memory, monkeypatch):
    """`bias` stays dense: its health travels behind its elements."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    stock.init()
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1,dense_below=8")
    given = gradients(0)
    given[where].reshape(-1)[3] = np.inf
    model.backward(given)
    with pytest.raises(NonFiniteGradientError, match=where):
        optimizer.step()
    assert not any(parameter.grad.any() for parameter in model.parameters())
    held = optimizer.state_dict()["horovod_sparse"]["residuals"]["first"]
    assert not held.any()
    train_step(model, optimizer, gradients(1))


def test_what_a_dense_parameter_carries_joins_its_sum():
    device = DeviceMemory(torch.device("cpu"))
    step = device.sum_dense("w", torch.tensor([1.0, 2.0]), np.array([0.5, 0.0], np.float32), (1, 3))
    request = next(step)
    assert request.buffer.tolist() == [1.5, 2.0, 0.0, 0.0, 0.0]
    with pytest.raises(StopIteration) as stop:
        step.send(request.buffer * 3)
    assert stop.value.value.tolist() == [4.5, 6.0]


def test_what_halves_round_off_waits():
    parameter = torch.nn.Parameter(torch.zeros(3))
    part = DenseParameters(["w"], [parameter], (0, 2), halves=True)
    waits = torch.zeros(3, dtype=torch.float64)

    def summed(name, step):
        return Task(name, done=True, result=carry_out(step, lambda request: 2 * request.buffer))

    for gradient in ([1.0001, 1e5, -3e-9], [2.0, -5e4, 1e-9]):
        parameter.grad = torch.tensor(gradient)
        given = parameter.grad.double() + waits
        part.start(SimpleNamespace(start=summed))
        part.apply(0.5)
        assert parameter.grad.abs().max() <= 65504 / 2
        waits = torch.from_numpy(part.held()[0]).double()
        torch.testing.assert_close(parameter.grad.double() + waits, given, rtol=1e-6, atol=0.0)
        assert waits.any()


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(
    "memory", [GradientMemory(), DeviceMemory(torch.device("cpu"))], ids=["host", "device"]
)
def test_the_bad_one_of_several_dense_parameters_is_named(memory, halves):
    members = [("a", 2), ("b", 3), ("c", 5)]
    for element, name in ((0, "a"), (1, "a"), (2, "b"), (3, "c"), (4, "c")):
        gradient = torch.ones(5, dtype=torch.float16 if halves else torch.float32)
        gradient[element] = torch.inf
        step = memory.sum_dense("all", gradient, None, (1, 3), members=members, halves=halves)
        with pytest.raises(NonFiniteGradientError) as found:
            carry_out(step, lambda request: request.buffer)
        assert found.value.where == {1: name}
