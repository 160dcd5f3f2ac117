"""One rank alone: what it is refused, what is freed, and a bug in a sparsifier."""

import gc
import weakref

import numpy as np
import pytest
import torch

hvd = pytest.importorskip("horovod_sparse.torch")

from horovod_sparse.errors import DeadlineError, UnsupportedError  # noqa: E402
from horovod_sparse.torch.driver import tensor_holding  # noqa: E402
from horovod_sparse.training.deadline import Deadline  # noqa: E402
from support.linear import LinearModel, dyadic  # noqa: E402
from support.optimizers import make, train_step, wrapped  # noqa: E402

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}


@pytest.fixture(autouse=True)
def one_rank():
    hvd.init()


def gradients(step: int) -> dict[str, np.ndarray]:
    return {name: dyadic(shape, step, name) for name, shape in SHAPES.items()}


def test_one_of_several_processes_that_horovod_does_not_know_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match=r"torchrun has started 2 .*horovodrun"):
        make(LinearModel(SHAPES), "topk:density=0.1")


@pytest.mark.parametrize("steps", [0, 2])
def test_models_and_optimizers_are_freed(steps):
    references = []
    for _ in range(3):
        model = LinearModel(SHAPES)
        optimizer = make(model, "topk:density=0.1")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for step in range(steps):
            train_step(model, optimizer, gradients(step))
            scheduler.step()
        references += [weakref.ref(item) for item in (optimizer, model, *model.parameters())]
        del model, optimizer, scheduler
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_a_model_whose_optimizer_is_gone_is_an_ordinary_one():
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1")
    train_step(model, optimizer, gradients(0))
    del optimizer
    gc.collect()
    for step in (1, 1):
        model.zero_grad()
        model.backward(gradients(step))
        np.testing.assert_array_equal(model.first.grad.numpy(), gradients(step)["first"])


@pytest.fixture
def elastic(monkeypatch, memory):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


def test_a_bug_in_a_sparsifier_is_raised_and_the_residual_is_whole(elastic, monkeypatch):
    model = LinearModel(SHAPES)
    optimizer = wrapped("stock", model, "topk:density=0.2", {"backward_passes_per_step": 2})
    monkeypatch.setattr("horovod_sparse.sparsifiers.base.unpack_sum", lambda *messages: 1 / 0)
    model.backward(gradients(0))
    optimizer.state_dict()  # between two passes
    model.backward(gradients(0))
    with pytest.raises(UnsupportedError, match="between steps"):
        optimizer.state_dict()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    monkeypatch.undo()
    residual = optimizer.state_dict()["horovod_sparse"]["residuals"]["first"]
    np.testing.assert_array_equal(residual.numpy(), 2 * gradients(0)["first"])


def test_a_tensor_is_held_though_horovod_changes_its_shape_meanwhile(monkeypatch):
    """Outputs are made without elements, and get theirs from Horovod's thread."""
    output = torch.zeros(0, dtype=torch.int32)
    expand = torch.Tensor.expand

    def slowly(tensor, shape):
        expanded = expand(tensor, shape)
        output.resize_(5)
        return expanded

    monkeypatch.setattr(torch.Tensor, "expand", slowly)
    assert tensor_holding(output).grad is output


def test_time_in_which_this_process_was_stopped_is_no_waiting():
    deadline = Deadline(60, lambda: (0, [0, 1]))
    looks = [*range(10), *range(3_000, 3_040)]  # stopped for most of an hour, like the other ranks
    for waited in looks:
        deadline.check(waited, "late", 1)
    with pytest.raises(DeadlineError, match="has waited 60 s"):
        for waited in range(3_040, 3_060):
            deadline.check(waited, "late", 1)
    for waited in (0.001, 59.0, 61.0):  # another wait
        deadline.check(waited, "later", 1)
