"""What users of Horovod's DistributedOptimizer rely on, with a sparsifier."""

import inspect

import horovod.torch as stock
import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.merging import Plan
from horovod_sparse.topology import Topology
from support.dyadic import gradients_for
from support.linear import LinearModel, same_on_all_ranks
from support.optimizers import gradients_of, make, train_step, wrapped
from support.passes import flat

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11)}
gradients = gradients_for(SHAPES)
pytestmark = pytest.mark.filterwarnings("ignore:Parameter `num_groups`:DeprecationWarning")


@pytest.mark.parametrize("front", ["own", "stock"])
def test_closures_and_hooks_see_synchronized_gradients(front, rank):
    results, seen = [], []
    for how in ("plain", "closure", "closure that synchronizes"):
        model = LinearModel(SHAPES)
        optimizer = wrapped(front, model, "topk:density=0.05")
        if how == "plain":
            optimizer.register_step_pre_hook(lambda *_, model=model: seen.append(gradients_of(model)))
        for step in range(3):

            def closure(model=model, optimizer=optimizer, step=step, how=how):
                optimizer.zero_grad()
                model.backward(gradients(rank, step))
                if how == "closure that synchronizes":
                    optimizer.synchronize()
                return float(step)

            if how == "plain":
                closure()
                optimizer.step()
            else:
                assert optimizer.step(closure) == float(step)
                assert same_on_all_ranks(*gradients_of(model).values())
        results.append(flat(model))
    assert len(seen) == 3 and same_on_all_ranks(*(one for found in seen for one in found.values()))
    assert same_on_all_ranks(*results) and all(torch.equal(results[0], one) for one in results)


def test_zero_grad_and_replan_in_the_middle_of_a_step_are_refused(rank):
    model = LinearModel(SHAPES)
    optimizer = make(model, "topk:density=0.1", bucket_bytes=700)
    model.backward({"second": gradients(rank, 0)["second"]})
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="replan"):
        optimizer.replan(optimizer.plan)
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        model.backward({"second": gradients(rank, 0)["second"]})
    optimizer.step()
    held = gradients_of(model)
    optimizer.replan(Plan((tuple(sorted(SHAPES)),)))  # not cleared before: what stands in the gradients stays
    assert all(torch.equal(held[name], p.grad) for name, p in model.named_parameters())
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    model.backward(gradients(rank, 1))
    before = optimizer.telemetry.last.step
    model.backward(gradients(rank, 1))
    optimizer.step()
    assert optimizer.telemetry.last.step == before + 1
    old, new = (torch.optim.AdamW(model.parameters()) for _ in "12")
    for one in (old, new, new):
        assert hvd.DistributedOptimizer(one, compression="best")._step_supports_amp_scaling
    with pytest.raises(UnsupportedError, match="given to another"):
        old.step()


def test_every_optimizer_of_pytorch_trains_as_with_horovod(rank):
    """Ranks use other heads, so that each lacks gradients of some parameters."""
    others = torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam
    for kind in (one for one in vars(torch.optim).values() if isinstance(one, type) and one not in others):
        trained = []
        for module, compression in ((hvd, "topk:density=1.0"), (stock, stock.Compression.none)):
            torch.manual_seed(5)
            body, *heads = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))  # Muon takes matrices alone
            model = torch.nn.ModuleList([body, *heads])
            optimizer = module.DistributedOptimizer(
                kind(model.parameters(), lr=0.01), model.named_parameters(), compression=compression
            )
            stock.broadcast_optimizer_state(optimizer, root_rank=0)
            for _ in range(2):
                optimizer.zero_grad()
                heads[rank % 2](body(torch.ones(4, 8))).square().sum().backward()
                optimizer.step()
            stock.broadcast_optimizer_state(optimizer, root_rank=0)
            trained.append(flat(model))
        torch.testing.assert_close(*trained, msg=kind.__name__)


def test_without_a_sparsifier_it_is_horovods_own(rank):
    for compression in (hvd.Compression.none, hvd.Compression.fp16, "none"):
        model = LinearModel(SHAPES)
        optimizer = make(model, compression)
        # before its first step it only compares what it has been given with the other ranks
        own = inspect.unwrap(optimizer.synchronize.__func__)
        assert own is stock.optimizer._DistributedOptimizer.synchronize
        train_step(model, optimizer, gradients(rank, 0))
        assert optimizer.telemetry.summary() == "no step yet"
        assert optimizer.plan is None


@pytest.mark.parametrize("named", [True, False])
def test_two_networks_of_the_same_names_are_under_way_at_once(named, rank, size):
    """As where one is trained through the other: backward reaches both before either steps."""
    models, optimizers = [LinearModel(SHAPES), LinearModel(SHAPES)], {}
    for which in (0, 1) if rank % 2 else (1, 0):  # made in different orders, too
        optimizers[which] = hvd.DistributedOptimizer(
            torch.optim.SGD(models[which].parameters(), lr=0.5),
            models[which].named_parameters() if named else None,
            compression="topk:density=1.0",
            op=stock.Sum,
            bucket_bytes=1,  # all buckets but the last start within the backward pass
        )
    for step in range(3):
        for which in (0, 1) if rank % 2 else (1, 0):
            models[which].backward(gradients(rank, 10 * which + step))
        for which in (0, 1):
            optimizers[which].step()
            for name, parameter in models[which].named_parameters():
                expected = sum(gradients(r, 10 * which + step)[name] for r in range(size))
                np.testing.assert_array_equal(parameter.grad.numpy(), expected)
            optimizers[which].zero_grad()


@pytest.mark.hosts
def test_a_process_set_is_divided_into_hosts_as_well(rank, size, process_set, monkeypatch):
    if size < 4:
        pytest.skip("takes two hosts of two ranks")
    some = process_set(range(4)) if size > 4 else hvd.global_process_set
    if rank >= 4:
        return
    model = LinearModel(SHAPES)
    monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", "2")
    optimizer = make(model, "topk:density=1.0", levels="host", process_set=some, op=stock.Sum)
    found = train_step(model, optimizer, gradients(rank, 0))
    for name, shape in SHAPES.items():
        wanted = sum(gradients(r, 0)[name] for r in range(4))
        np.testing.assert_array_equal(found[name].numpy().reshape(shape), wanted)
    assert optimizer._synchronizer.topology == Topology.regular(2, 2)
