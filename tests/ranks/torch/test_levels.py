"""Two levels on real ranks: dense within hosts, sparse between them. Hosts are what a test says."""

from __future__ import annotations

import gc
from pathlib import Path

import horovod.torch as stock
import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import (
    EditedGradientError,
    NonFiniteGradientError,
    UnsupportedError,
)
from horovod_sparse.merging import Plan, predict
from horovod_sparse.planning import by_cost
from horovod_sparse.planning.calibration.steps import measured_step
from horovod_sparse.topology import Topology
from support.dyadic import gradients_for
from support.linear import LinearModel, dyadic, same_on_all_ranks
from support.optimizers import make, residuals_of, train_step

pytestmark = pytest.mark.hosts

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11), "one": (1,)}
gradients = gradients_for(SHAPES)


@pytest.fixture(autouse=True)
def per_host(monkeypatch, size):
    """Two ranks on a host, or all of them where that leaves a host with fewer."""
    number = 2 if size % 2 == 0 else size
    monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", str(number))
    return number


def made(model, compression, **arguments):
    arguments = {"levels": "host", "bucket_bytes": 680, **arguments}
    return make(model, compression, **arguments)


def total_of(arrays, name):
    """The sum over ranks of what a checkpoint holds of every parameter."""
    return {
        key: stock.allreduce(value.double(), op=stock.Sum, name=f"{name}.{key}")
        for key, value in arrays.items()
    }


def test_memory_is_given_back(rank):
    """Of an optimizer that is gone, and of other plans; where another rank reads until the end."""

    def mapped():
        gc.collect()
        return Path("/proc/self/maps").read_text().count("/memfd:horovod_sparse")

    before, files = mapped(), sorted(Path("/dev/shm").glob("*sparse*"))
    model = LinearModel(SHAPES)
    optimizer = made(model, "topk:density=0.1")
    train_step(model, optimizer, gradients(rank, 0))
    held = mapped()
    assert held > before
    for names in (tuple(SHAPES), tuple(reversed(SHAPES))):
        optimizer.replan(Plan((names,)))
        train_step(model, optimizer, gradients(rank, 1))
        assert mapped() == held
    del optimizer, model
    assert mapped() <= before and sorted(Path("/dev/shm").glob("*sparse*")) == files


def test_a_changed_gradient_is_told_to_all_ranks(rank, size):
    model = LinearModel(SHAPES)
    optimizer = made(model, "topk:density=0.2")
    train_step(model, optimizer, gradients(rank, 0))
    model.backward(gradients(rank, 1))
    if rank == size - 1:
        model.first.grad.mul_(2.0)
    with pytest.raises(EditedGradientError) as raised:
        optimizer.step()
    assert [*raised.value.where] == [size - 1]


def test_a_nan_beside_a_changed_gradient_gets_into_no_residual(rank, size):
    """Both on one host, in memory that its ranks share."""
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


def test_auto_uses_two_levels_where_hosts_are_alike_and_it_is_faster(monkeypatch, rank, size):
    large = {"w": (2_000_000,)}
    cases = ((size, large, False), (1, large, False), (size - 1, large, False))
    cases += ((2, SHAPES, False), (2, large, size in (4, 6)))
    for number, shapes, two in cases:
        monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", str(max(number, 1)))
        model = LinearModel(shapes)
        optimizer = made(model, "topk:density=0.05", levels="auto")
        train_step(model, optimizer, {name: dyadic(shape, rank) for name, shape in shapes.items()})
        assert (optimizer._synchronizer.topology is not None) == two, (number, len(shapes))


def test_hosts_of_different_size_are_refused_on_all_ranks(monkeypatch, rank, size):
    if size < 3:
        pytest.skip("two ranks are on one host, or on two")
    monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", str(size - 1))
    model = LinearModel(SHAPES)
    optimizer = made(model, "topk:density=0.1")
    model.backward(gradients(rank, 0))
    with pytest.raises(UnsupportedError, match=f"host 0: {size - 1}, host 1: 1"):
        optimizer.step()


def test_ranks_share_other_hosts_after_another_start(monkeypatch, rank, size):
    """As in elastic training, where hosts come and go: residuals go to whose shards they are now."""
    if stock.mpi_enabled() or size < 4:
        pytest.skip("MPI cannot be started again; fewer ranks share a launch with all other tests")
    model = LinearModel(SHAPES)
    optimizer = made(model, "topk:density=0.05", op=stock.Sum)
    for step in range(2):
        train_step(model, optimizer, gradients(rank, step))
    held = total_of(residuals_of(optimizer), "held")
    before = optimizer._synchronizer.topology
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", "1")
    hvd.init()
    nothing = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    found = train_step(model, optimizer, nothing)
    assert optimizer._synchronizer.topology == Topology.regular(size, 1) != before
    after = total_of(residuals_of(optimizer), "after")
    for name, shape in SHAPES.items():
        now = found[name].double() + after[name].reshape(shape)
        torch.testing.assert_close(now, held[name].reshape(shape), rtol=1e-6, atol=1e-5)
    assert same_on_all_ranks(*found.values())


@pytest.mark.parametrize("algorithm", ["topk"])
def test_plans_by_times_are_made_for_both_levels(algorithm, rank, size, per_host):
    """The warm-up measures both, and predictions are of both; nothing is lost while the plan changes."""
    if size < 4:
        pytest.skip("takes two hosts of two ranks")
    model, text = LinearModel(SHAPES), f"{algorithm}:density=0.1"
    optimizer = made(model, text, op=stock.Sum, bucket_bytes=None, merging="optimal")
    applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    steps = 0
    while optimizer.decision is None:
        for name, found in train_step(model, optimizer, gradients(rank, steps)).items():
            applied[name] += found.double()
        steps += 1
    held = total_of(residuals_of(optimizer), "held")
    for name in SHAPES:
        wanted = sum(gradients(r, step)[name] for r in range(size) for step in range(steps))
        np.testing.assert_allclose((applied[name] + held[name]).numpy(), wanted, atol=1e-4)
    decision, facts = optimizer.decision, [fact for fact, _ in optimizer._synchronizer.facts.values()]
    profile, topology = decision.profile, Topology.regular(size // per_host, per_host)
    assert (profile.num_hosts, profile.per_host) == (topology.num_hosts, per_host)
    sparsifier = optimizer._synchronizer.recipe.sparsifier
    told = {
        levels: predict(workload, decision.plan, cost).iteration_seconds
        for levels, (workload, cost) in (
            ("host", measured_step(profile, facts, sparsifier, size, topology)),
            ("flat", measured_step(profile, facts, sparsifier, size)),
        )
    }
    assert decision.predicted_seconds["taken"] == told["host"] != told["flat"]
    # with that profile another training begins with the plan, and with the levels that are faster
    again = made(
        LinearModel(SHAPES), text, bucket_bytes=None, merging="optimal", profile=profile, levels="auto"
    )
    choice = by_cost(sparsifier, facts, again._synchronizer._first.request)(topology.num_hosts, per_host)
    assert (again._synchronizer.topology == topology) == (choice.levels == "host")
    assert again.decision.predicted_seconds["taken"] == min(choice.flat_seconds, choice.host_seconds)
