"""The memories behind the PyTorch front end give the same bits, and refuse devices that cannot serve."""

import logging

import numpy as np
import pytest
import torch

from horovod_sparse.errors import (
    EditedGradientError,
    NonFiniteGradientError,
    NonFiniteSumError,
    UnsupportedError,
)
from horovod_sparse.feedback import Bucket, Member, recipe
from horovod_sparse.kernels.host import scatter
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors import flat_gradient
from horovod_sparse.tensors.device_memory import DeviceMemory
from horovod_sparse.tensors.flat_gradient import FlatGradient, GradientMemory, memory_of
from horovod_sparse.tensors.layout import memory_strides, shaped, unshaped
from horovod_sparse.training.engine import carry_out
from support.memories import choose_memory
from support.sampling import rows_by

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


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


MEMORIES = [GradientMemory(), DeviceMemory(torch.device("cpu"))]


@pytest.mark.parametrize("memory", MEMORIES, ids=["host", "device"])
def test_what_a_dense_parameter_carries_joins_its_sum(memory):
    info = BucketInfo("w", 2, 1, 3)
    bucket = Bucket(info, recipe("topk").for_dense(), memory.whole(info))
    bucket.accumulator.assign_held([np.array([0.5, 0.0], np.float32)])
    gradient = torch.tensor([1.0, 2.0])
    for expected in ([1.5, 2.0], [1.0, 2.0]):
        step = bucket.step(memory.foldable(gradient))
        request = next(step)
        assert request.buffer.tolist() == [*expected, *[0.0] * 9]
        with pytest.raises(StopIteration) as stop:
            step.send(request.buffer * 3)
        assert stop.value.value.values.tolist() == [3 * one for one in expected]
        bucket.accept()
        assert bucket.accumulator.held() == ()


@pytest.mark.parametrize("memory", MEMORIES, ids=["host", "device"])
def test_the_bad_one_of_several_dense_parameters_is_named(memory):
    info, members = BucketInfo("all", 5, 1, 3), [Member("a", 0, 2), Member("b", 2, 3), Member("c", 3, 5)]
    bucket = Bucket(info, recipe("topk").for_dense(), memory.whole(info), members)
    for element, name in ((0, "a"), (1, "a"), (2, "b"), (3, "c"), (4, "c")):
        gradient = torch.ones(5)
        gradient[element] = torch.inf
        with pytest.raises(NonFiniteGradientError) as found:
            carry_out(bucket.step(memory.foldable(gradient)), lambda request: request.buffer)
        assert found.value.where == {1: name}
        total = carry_out(bucket.step(memory.foldable(torch.ones(5))), lambda request: request.buffer)
        assert total.values.tolist() == [1.0] * 5, "the step that was given up is dropped"
        bucket.accept()


@pytest.mark.parametrize("memory", MEMORIES, ids=["host", "device"])
def test_who_refuses_a_dense_gradient_is_told(memory):
    info = BucketInfo("all", 3000, 1, 3)
    bucket = Bucket(info, recipe("topk").for_dense(), memory.whole(info))
    with pytest.raises(EditedGradientError) as found:
        step = bucket.step(memory.foldable(torch.ones(3000)), refused=True)
        carry_out(step, lambda request: request.buffer)
    assert list(found.value.where) == [1]
    bucket.abandon(drop=True)
    with pytest.raises(NonFiniteSumError):
        gradient = torch.full((3000,), 3e38)
        carry_out(bucket.step(memory.foldable(gradient)), lambda request: request.buffer * 3)


def parameters(dtype=torch.float32):
    shapes = [(4, 5), (), (3,)]
    made = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    made.append(torch.nn.Parameter(torch.ones(2, 3, 4, 4, dtype=dtype).to(memory_format=torch.channels_last)))
    made.append(torch.nn.Parameter(torch.ones(6, 7, dtype=dtype).t()))
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_adds_into_the_buffer(dtype):
    made = parameters(dtype)
    gradient = FlatGradient(made)
    gradient.gather()
    for number, parameter in enumerate(made):
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.stride() == parameter.stride()
        (parameter * (number + 1)).sum().backward()
    gradient.gather()
    expected = np.concatenate([np.full(p.numel(), i + 1.0) for i, p in enumerate(made)])
    np.testing.assert_array_equal(gradient.flat.float().numpy(), expected)
    assert gradient.flat.numel() == gradient.num_elements == sum(p.numel() for p in made)


def test_gradients_from_elsewhere_are_taken_over_and_missing_ones_are_zero():
    made = parameters()
    gradient = FlatGradient(made)
    gradient.flat.fill_(7.0)
    made[0].grad = torch.arange(20.0).reshape(4, 5)
    made[2].grad = torch.tensor([0.0, 2.0, 0.0]).to_sparse()
    gradient.gather_existing()
    assert made[1].grad is None
    gradient.gather()
    assert all(p.grad is view for p, view in zip(made, gradient.views, strict=True))
    np.testing.assert_array_equal(gradient.flat.numpy()[:24], [*range(20), 0, 0, 2, 0])
    assert not gradient.flat.numpy()[24:].any()


def written(gradient, monkeypatch):
    """One entry for every time that the whole buffer is zeroed."""
    calls = []
    owners = [(type(gradient.memory), "zero")]
    if type(gradient.memory) is GradientMemory:  # on the host one kernel clears and writes
        owners = [(scatter, "clear_all"), (flat_gradient, "clear_all")]
    for owner, name in owners:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, do=original: (calls.append(1), do(*given)))
    return calls


def scattered():
    made = [torch.nn.Parameter(torch.ones(1000)) for _ in range(3)]
    gradient = FlatGradient(made)
    gradient.gather()
    gradient.flat.numpy()[:] = 0
    assert gradient.scatter(np.array([5, 1500, 5], np.int32), np.array([1, 2, 3], np.float32)) == 2
    assert made[0].grad[5] == 4.0
    return made, gradient


CHANGES = {
    "in place": lambda p: p.grad.add_(1.0),
    "clipping": lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1),
    "foreach": lambda p: torch._foreach_add_([p.grad], 1.0),
    "backward": lambda p: p.sum().backward(),
    "inference mode": lambda p: torch.inference_mode()(p.grad.add_)(1.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whoever_writes_to_a_gradient_makes_zeroing_complete(change, monkeypatch):
    made, gradient = scattered()
    change(made[1])
    calls = written(gradient, monkeypatch)
    gradient.clear()
    assert not gradient.flat.numpy().any()
    assert calls


def test_writing_through_data_is_noticed_and_remembered(monkeypatch, caplog):
    made, gradient = scattered()
    made[1].grad.data.add_(0.5)
    with caplog.at_level(logging.INFO, "horovod_sparse"):
        gradient.clear()
    assert not gradient.flat.numpy().any()
    assert ".data" in caplog.text
    gradient.scatter(np.array([7], np.int32), np.ones(1, np.float32))
    calls = written(gradient, monkeypatch)
    gradient.clear()
    assert calls
    assert not gradient.flat.numpy().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_in_coo_form_go_to_their_own_place(dtype):
    """A view whose storage begins earlier would be written at twice its offset by PyTorch."""
    made = [torch.nn.Parameter(torch.ones(4, 3, dtype=dtype)) for _ in range(3)]
    gradient = FlatGradient(made)
    gradient.gather()
    made[1].gather(0, torch.tensor([[1, 1, 2]]), sparse_grad=True).sum().backward()
    expected = np.zeros((3, 4, 3))
    expected[1, 1, :2] = expected[1, 2, 2] = 1
    np.testing.assert_array_equal(gradient.flat.double().numpy(), expected.reshape(-1))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(2, 3),
        torch.empty(2, 3).t(),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(4, 1, 3).transpose(0, 2),
        torch.empty(6, 8)[:, ::2],
        torch.empty(3, 1).expand(3, 4),
        torch.empty(()),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_layouts_are_dense_and_survive_a_checkpoint(tensor):
    strides = memory_strides(tensor)
    flat = torch.arange(tensor.numel())
    view = flat.as_strided(tensor.shape, strides)
    assert sorted(view.reshape(-1).tolist()) == flat.tolist()
    if torch.empty_like(tensor).stride() == tensor.stride():  # preserves what is dense
        assert all(s == t for s, t, n in zip(strides, tensor.stride(), tensor.shape, strict=True) if n > 1)
    values = np.arange(tensor.numel(), dtype=np.float32)
    saved = shaped(values, tensor)
    assert saved.is_contiguous()
    assert saved.shape == tensor.shape
    np.testing.assert_array_equal(unshaped(saved, tensor), values)


def test_zeroing_writes_only_to_what_was_scattered(monkeypatch):
    _, gradient = scattered()
    calls = written(gradient, monkeypatch)
    gradient.clear()
    gradient.clear()
    assert not gradient.flat.numpy().any()
    assert not calls
