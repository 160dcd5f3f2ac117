"""Two levels on real ranks: dense within hosts, sparse between them. Hosts are what a test says."""

import horovod.torch as stock
import numpy as np
import pytest

import horovod_sparse.torch as hvd
from horovod_sparse.errors import EditedGradientError, NonFiniteGradientError
from horovod_sparse.topology import Topology
from support.dyadic import gradients_for
from support.linear import LinearModel, same_on_all_ranks
from support.optimizers import make, residuals_of, train_step

pytestmark = pytest.mark.hosts

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11), "one": (1,)}
gradients = gradients_for(SHAPES)


@pytest.fixture(autouse=True)
def per_host(monkeypatch, size):
    number = 2 if size % 2 == 0 else size
    monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", str(number))
    return number


def made(model, compression, **arguments):
    arguments = {"levels": "host", "bucket_bytes": 680, **arguments}
    return make(model, compression, **arguments)


def test_a_nan_beside_a_changed_gradient_gets_into_no_residual(rank, size):
    model = LinearModel(SHAPES)
    optimizer = made(model, "topk:density=0.2")
    train_step(model, optimizer, gradients(rank, 0))
    sick = gradients(rank, 1)
    if rank == size - 2:
        sick["one"] = np.full(SHAPES["one"], np.nan)
    model.backward(sick)
    if rank == size - 1:
        model.first.grad.mul_(2.0)
    with pytest.raises((EditedGradientError, NonFiniteGradientError)) as raised:
        optimizer.step()
    assert {size - 2, size - 1} & set(raised.value.where)
    assert all(values.isfinite().all() for values in residuals_of(optimizer).values())
    optimizer.zero_grad()
    for step in (2, 3):
        train_step(model, optimizer, gradients(rank, step))
    assert same_on_all_ranks(*model.parameters())
    assert all(values.isfinite().all() for values in model.parameters())


def test_a_process_set_is_divided_as_well(rank, size, process_set):
    if size < 4:
        pytest.skip("takes two hosts of two ranks")
    some = process_set(range(4)) if size > 4 else hvd.global_process_set
    if rank >= 4:
        return
    model = LinearModel(SHAPES)
    optimizer = made(model, "topk:density=1.0", process_set=some, op=stock.Sum)
    found = train_step(model, optimizer, gradients(rank, 0))
    for name, shape in SHAPES.items():
        wanted = sum(gradients(r, 0)[name] for r in range(4))
        np.testing.assert_array_equal(found[name].numpy().reshape(shape), wanted)
    assert optimizer._synchronizer.topology == Topology.regular(2, 2)
