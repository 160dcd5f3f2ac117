"""What Horovod's own optimizer does with our compressor, and what goes wrong on every rank alike."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_sparse.errors import NonFiniteSumError, UnsupportedError
from horovod_sparse.torch import Compression
from horovod_sparse.torch.driver import present_start
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.optimizers import wrapped

SHAPES = {"first": (40, 3), "second": (50,), "third": (9, 2)}


def make(text: str = "topk", shapes=SHAPES, density: float = 0.1, **arguments):
    model = LinearModel(shapes)
    compressor = Compression.parse(f"{text}{',' if ':' in text else ':'}density={density}")
    return model, wrapped("stock", model, compressor, arguments)


def train(model, optimizer, steps, rank) -> None:
    for step in steps:
        model.backward({name: dyadic(SHAPES[name], rank, step, name) for name in SHAPES})
        optimizer.step()
        optimizer.zero_grad()


def test_adasum_is_refused(rank, size):
    with pytest.raises(UnsupportedError, match="Adasum"):
        wrapped("own", LinearModel(SHAPES), "topk:density=0.1", {"op": hvd.Adasum})
    with pytest.raises(UnsupportedError, match="Adasum"):
        make(op=hvd.Adasum)


@pytest.mark.parametrize("front", ["own", "stock"])
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_half_types_hold_less(rank, size, front, op):
    """What the sum is multiplied by counts: an average of numbers that a type holds is held by it."""
    model = LinearModel(SHAPES, torch.float16)
    optimizer = wrapped(front, model, "topk:density=0.1", {"op": getattr(hvd, op)})
    given = {key: np.zeros(shape) for key, shape in SHAPES.items()}
    given["first"][3, 1] = 6e4
    model.backward(given)
    if op == "Sum":
        with pytest.raises(NonFiniteSumError, match="first"):
            optimizer.step()
    else:
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert same_on_all_ranks(*model.parameters())


@pytest.mark.controllers
def test_a_failure_of_horovod_leaves_residuals_whole_and_names_free(rank, size):
    model, optimizer = make("randomk", shapes={"first": (40 + 10 * rank, 3)}, density=0.5)
    optimizer._synchronizer._agreed_under = present_start()  # else ranks would say so before
    gradient = dyadic((40 + 10 * rank, 3), rank)
    model.backward({"first": gradient})
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()
    assert not optimizer._synchronizer.engine.parked
    assert torch.equal(
        optimizer.state_dict()["horovod_sparse"]["residuals"]["first"], torch.from_numpy(gradient).float()
    )
    hvd.barrier()
    model, optimizer = make("randomk")  # the same name, in the same way, works again
    train(model, optimizer, range(2), rank)
    assert same_on_all_ranks(*model.parameters())


def test_one_changed_line_is_enough(rank, size):
    model = LinearModel(SHAPES)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, compression=Compression.exdyna(density=0.05))
    train(model, optimizer, range(4), rank)
    assert same_on_all_ranks(*model.parameters())
    names = set(optimizer.state_dict()["horovod_sparse"]["residuals"])
    assert names == {f"allreduce.noname.0.{i}" for i in range(len(SHAPES))}


@pytest.mark.controllers
def test_join_is_an_error_for_those_who_train_on(rank, size):
    """Last in this file: ranks leave it one after the other."""
    model = LinearModel(SHAPES)
    optimizer = wrapped("own", model, "topk:density=0.1")
    if rank == size - 1:
        model.backward({name: dyadic(shape, rank, 0, name) for name, shape in SHAPES.items()})
        with pytest.raises(UnsupportedError, match="join"):
            optimizer.step()
    hvd.join()
    train(model, optimizer, [1], rank)
    assert same_on_all_ranks(*model.parameters())
