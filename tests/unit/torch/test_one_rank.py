"""One rank does what each of many does: equal to the simulator with P = 1, feedback included."""

import gc
import weakref

import numpy as np
import pytest
import torch

hvd = pytest.importorskip("horovod_sparse.torch")

from horovod_sparse.errors import UnsupportedError  # noqa: E402
from horovod_sparse.feedback import parse_recipe  # noqa: E402
from horovod_sparse.simulation import SimulatedCluster  # noqa: E402
from support.cases import on_ranks  # noqa: E402
from support.linear import LinearModel, dyadic  # noqa: E402
from support.optimizers import flat, in_bucket_order, make, train_step, wrapped  # noqa: E402

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}
NAMES = ("second", "bias", "first")


@pytest.fixture(autouse=True)
def one_rank():
    hvd.init()


def gradients(step: int) -> dict[str, np.ndarray]:
    return {name: dyadic(shape, step, name) for name, shape in SHAPES.items()}


FEEDBACKS = ["momentum(momentum=0.9)", "momentum(momentum=0.5,clip_norm=1.0)", "error(clip_norm=0.5)"]
CASES = [*on_ranks(), *(pytest.param(text, id=text) for text in FEEDBACKS)]


@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_equals_the_simulator_with_one_rank(case, memory):
    recipe = parse_recipe(f"topk:density=0.1,feedback={case}") if isinstance(case, str) else case.at(0.1)
    model = LinearModel(SHAPES)
    optimizer = make(model, hvd.SparseCompressor(recipe))
    cluster = SimulatedCluster(recipe, 1372, 1, number=0)
    for step in range(4):
        found = train_step(model, optimizer, gradients(step))
        expected = cluster.step([in_bucket_order(gradients(step), NAMES)], 0.5)
        np.testing.assert_array_equal(flat(found, NAMES), expected)
    assert optimizer.telemetry.last.step == 4


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
