"""Gradients behind DistributedDataParallel and in plain modules: loops of users, and what is refused."""

import copy
import gc
import logging
import threading
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse import ddp
from horovod_sparse.errors import ArgumentError, StateMismatchError, UnknownNameError, UnsupportedError
from horovod_sparse.merging import Plan
from horovod_sparse.sparsifiers.base import SelectAndGather, Selected
from support.dyadic import gradients_for
from support.linear import LinearModel
from support.replicas import Replica, same_on_all_replicas

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "one": (1,)}
gradients = gradients_for(SHAPES)
TEXT = "topk:density=0.1"


def test_a_sparsifier_of_ones_own_is_one(rank):
    @dataclass(frozen=True, kw_only=True)
    class First(SelectAndGather):
        name = "first"

        def select(self, accumulator, k, state, info):
            return Selected(np.arange(k, dtype=np.int32))

    replica = Replica(SHAPES, First(density=0.1))
    found = replica.step(gradients(rank, 0))
    assert 0 < sum(int(one.count_nonzero()) for one in found.values()) <= 0.11 * 1373
    assert same_on_all_replicas(*found.values())


def test_a_model_that_is_wrapped_again_has_one_exchange(rank):
    first = Replica(SHAPES, TEXT)
    first.step(gradients(rank, 0))
    model = DistributedDataParallel(first.net)
    again = ddp.attach(model, "topk:density=0.1", first.optimizer)
    model(gradients(rank, 1)).backward()
    assert (first.sync.step, again.step) == (1, 1)
    again.replan(Plan((tuple(SHAPES),)))  # a hook that ran twice would keep buckets to the end of a pass
    assert {len(one._post_accumulate_grad_hooks) for one in first.net.parameters()} == {1}
    assert same_on_all_replicas(*(one.grad for one in first.net.parameters()))


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_thrown_away_are_refused_or_kept_on_the_rank(to_none, rank):
    replica = Replica(SHAPES, TEXT)
    replica.step(gradients(rank, 0))
    before = {name: one.clone() for name, one in replica.held().items()}
    replica.model.require_backward_grad_sync = False  # what no_sync() does
    replica.model(gradients(rank, 1)).backward()
    replica.model.require_backward_grad_sync = True
    replica.optimizer.zero_grad(set_to_none=to_none)
    assert all(torch.equal(one, before[name]) for name, one in replica.held().items())
    replica.model(gradients(rank, 1)).backward()
    replica.optimizer.zero_grad(set_to_none=to_none)
    with pytest.raises(UnsupportedError, match="thrown away"):
        replica.model(gradients(rank, 2)).backward()
    replica.model(gradients(rank, 3)).backward()
    gradient = weakref.ref(replica.net.first.grad)
    replica.optimizer.step()
    replica.optimizer.zero_grad()
    assert gradient() is None  # its memory is free
    assert same_on_all_replicas(*replica.net.parameters())


def test_what_cannot_be_loaded_is_refused(rank):
    replica = Replica(SHAPES, TEXT)
    fresh = replica.sync.state_dict()
    for _ in range(2):
        replica.step(gradients(rank, 0))
    entry = replica.sync.state_dict()
    for shapes, words in (({"other": (3,)}, "another model"), (SHAPES | {"bias": (9,)}, "shape")):
        with pytest.raises(StateMismatchError, match=words):
            Replica(shapes, "topk:density=0.1").sync.load_state_dict(entry)
    for nothing in (fresh, None):  # from the beginning
        replica.sync.load_state_dict(nothing)
        assert not any(residual.any() for residual in replica.held().values())
        replica.step(gradients(rank, 1))
        assert replica.sync.step == 1


def test_what_is_no_model_or_no_sparsifier_is_refused(rank):
    plain = Replica(SHAPES, None)
    zero = ZeroRedundancyOptimizer(plain.net.parameters(), torch.optim.SGD, lr=0.1)
    momentum = torch.optim.SGD(plain.net.parameters(), lr=0.1, momentum=0.9)
    for words, model, *given in (
        *(("attach nothing", plain.model, none) for none in ("none", 0.1, None)),
        *((r"=\w+\(.*swapped", plain.model, swapped, "best") for swapped in (plain.model, plain.optimizer)),
        ("optimizer=", plain.model, TEXT, plain.net.parameters()),
        ("optimizer=", LinearModel(SHAPES), TEXT, None),
        ("one without bias", plain.model, TEXT, torch.optim.SGD([plain.net.first], lr=0.1)),
        ("='ZeroRedundancyOptimizer'", plain.model, "best", zero),
        (r"model\._orig_mod", torch.compile(plain.model), TEXT),
        ("momentum", plain.model, "dgc:density=0.1,feedback=momentum", momentum),
    ):
        with pytest.raises(ArgumentError, match=words):
            ddp.attach(model, *given)
    with pytest.raises(UnknownNameError, match="did you mean delay"):
        ddp.attach(plain.model, TEXT, dealy=1)
    plain.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(UnsupportedError, match="has a communication hook"):
        ddp.attach(plain.model, "topk:density=0.1")


def test_a_copy_of_a_model_has_no_hook(rank, caplog):
    replica = Replica(SHAPES, TEXT)
    replica.step(gradients(rank, 0))
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        twin = copy.deepcopy(replica.model)
    assert "not synchronized sparsely" in caplog.text
    sync = ddp.attach(twin, "topk:density=1.0")
    twin(gradients(rank, 1)).backward()
    assert sync.step == replica.sync.step == 1
    again = ddp.attach(twin, "topk:density=0.1")  # takes the place of the former
    twin(gradients(rank, 1)).backward()
    assert (sync.step, again.step) == (1, 1)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("of the user")


def test_passes_that_fail_or_reach_no_parameter_leave_nothing(rank):
    torch.manual_seed(0)
    net = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
    net.forward = lambda x: (net[1](_Failing.apply(net[0](x)) if x.sum() > 99 else net[0](x)), net[0](x))
    model = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    sync = ddp.attach(model, "topk:density=0.1", optimizer)
    inputs, held = torch.ones(2, 6, requires_grad=True), {}
    for step in range(5):
        if step == 3:
            held = {name: one.clone() for name, one in sync.state_dict()["residuals"].items()}
            with pytest.raises(ValueError, match="of the user"):
                model(100 * inputs)[0].square().sum().backward()
            with pytest.raises(UnsupportedError, match="the last backward pass failed"):
                optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            torch.autograd.grad(model(inputs)[0].sum(), inputs)
        with torch.no_grad():
            model(inputs)
        assert not model.require_forward_param_sync  # ranks may validate unequally often
        model(inputs * (rank + 1))[0].square().sum().backward()
        if step == 3:
            before = max(float(one.abs().max()) for one in held.values())

            assert all(float(one.grad.abs().max()) < 100 + 10 * before for one in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
        assert sync.step == step + 1
    assert same_on_all_replicas(*net.parameters())


def test_a_model_that_is_gone_leaves_no_thread(rank):
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "horovod_sparse.ddp"}

    gc.collect()
    before = threads()
    replica = Replica(SHAPES, TEXT)
    replica.step(gradients(rank, 0))
    own = threads() - before  # one of a former test may end meanwhile
    gone = weakref.ref(replica.sync)
    del replica
    gc.collect()
    assert gone() is None
    assert own and own.isdisjoint(threads())
