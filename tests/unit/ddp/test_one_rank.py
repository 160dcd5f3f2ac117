"""What needs a group of torch.distributed, and no other rank."""

import contextlib
import copy
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from horovod_sparse import ddp
from horovod_sparse.collectives import Exchange, single_request
from horovod_sparse.ddp.collectives import Carrier
from horovod_sparse.ddp.distributed_engine import Communicator, Deadline, _construction_errors
from horovod_sparse.errors import (
    ArgumentError,
    CollectiveMismatchError,
    DeadlineError,
    HorovodSparseError,
    UnsupportedError,
)
from horovod_sparse.trainers import transformers_callback
from support.passes import backward, batches, begun, flat, momentum, net_of, train


@pytest.fixture(autouse=True)
def no_group_of_others():
    """Others leave their group of one rank to the tests that follow in this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


@pytest.mark.parametrize("when", ["before attach", "before the first step"])
@pytest.mark.parametrize("text", ["topk:density=1.0", "topk:density=1.0,feedback=best", "local steps"])
def test_fsdp2_may_be_evaluated_first(text, when, mesh):
    """A forward pass without a backward pass leaves whole parameters in the model."""
    inputs, ends = next(batches(0))[0], []
    for evaluates in (False, True):
        net = fully_shard(net_of(), mesh=mesh["shard"])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if evaluates and when == "before attach":
            net(inputs)
        if text == "local steps":
            group = mesh["replicate"].get_group()
            ddp.LocalSteps(optimizer, net, every=2, process_group=group)
        else:
            ddp.attach(net, text, optimizer, replicas=mesh["replicate"])
        for number, batch in enumerate(batches(0, 4)):
            backward(net, batch)
            if evaluates and number == 0 and when != "before attach":
                net(inputs)
            optimizer.step()
        net.reshard()
        ends.append(flat(net).full_tensor())
    assert torch.equal(*ends)


def test_an_optimizer_may_be_saved_after_a_backward_pass_that_failed(mesh, caplog):
    net = net_of()
    model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)
    sync = ddp.attach(model, "topk:density=0.5", optimizer)
    batch = next(batches(0))
    backward(model, batch)
    optimizer.step()
    assert "horovod_sparse" in optimizer.state_dict()
    failing = net[0].weight.register_hook(lambda _: [][0])
    with pytest.raises(IndexError):
        backward(model, batch)
    assert "horovod_sparse" not in optimizer.state_dict()
    assert "without its residual" in caplog.text
    assert not any(left() is not None for _, left, _ in sync._left)  # freed: no later one is taken for it
    failing.remove()
    backward(model, batch)
    assert "horovod_sparse" in optimizer.state_dict()


@pytest.mark.parametrize("text", ["topk:density=0.5", "best"])
def test_an_optimizer_is_attached_or_takes_local_steps(text, mesh):
    net = net_of()
    one, other = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    ddp.LocalSteps(one, net, every=2)
    ddp.attach(net, text, other).settle()  # as trainers' callbacks do
    with pytest.raises(ArgumentError, match="without LocalSteps"):
        ddp.attach(net, text, one)
    with pytest.raises(ArgumentError, match="without attach"):
        ddp.LocalSteps(other, net, every=2)


def test_a_scaler_skips_a_step_whose_first_parameter_has_no_gradient(mesh):
    nets = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)])
    optimizer, scaler = torch.optim.SGD(nets.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 2.0**100)
    ddp.attach(nets, "topk:density=0.5", optimizer)
    scaler.scale(nets[0](torch.full((1, 3), 1e30)).sum()).backward()
    scaler.step(optimizer)
    assert all(one.isfinite().all() for one in nets.parameters())


def test_a_wrapper_that_is_detached_synchronizes_again(mesh):
    model = DistributedDataParallel(net_of())
    ddp.attach(model, "best", torch.optim.SGD(model.parameters(), lr=0.1)).detach()
    assert model.require_backward_grad_sync and not model._forward_pre_hooks


def test_detach_undoes_the_moves_of_a_checkpoint_that_was_just_loaded(mesh):
    net, optimizer, sync = begun(delay=1)
    train(net, optimizer, 0, 5)
    saved, model = sync.state_dict(), copy.deepcopy(net.state_dict())
    with sync.common():
        common = flat(net)
    net, _, sync = begun(delay=1)
    net.load_state_dict(model)
    sync.load_state_dict(saved)
    sync.detach()
    assert torch.equal(flat(net), common)


def test_a_coroutine_goes_no_further_behind_the_deadline():
    store, went_on = dist.HashStore(), []
    lane = SimpleNamespace(size=1, in_messages=single_request, begin=lambda _: partial(store.get, "answer"))
    communicator = Communicator([lane], Deadline(0.2, lambda: (0, [0]), lambda *_: None))
    for _ in range(2):
        with pytest.raises(DeadlineError):
            communicator.wait([communicator.start("late", (one and went_on.append(one) for one in range(2)))])
        store.set("answer", "")
    assert not went_on


@pytest.mark.parametrize("failing", ["recv", "send", "second part"])
def test_a_rank_that_has_left_before_a_message_begins_is_named(failing, mesh):
    def lost(*_):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4321")

    def long_message(parts, _, tag):
        if tag % 2:
            lost()
        parts[0][:2] = torch.tensor([5000, carrier._name_hash()])
        return SimpleNamespace(wait=lambda: None)

    carrier = Carrier(None)
    carrier.size, carrier._from, carrier._to = 2, carrier._from * 2, carrier._to * 2
    carrier._host = lambda: SimpleNamespace(**{"recv": long_message, "send": lambda *_: None, failing: lost})
    with pytest.raises(CollectiveMismatchError, match=r"rank 1 ended, or left, before .*4321"):
        carrier(Exchange({1: np.zeros(3, np.int32)}, (1,)))


@pytest.mark.parametrize("local", [False, True])
def test_the_next_step_raises_what_has_ended_an_exchange(local, mesh, monkeypatch):
    net = net_of()
    optimizer = momentum(net)
    make = ddp.LocalSteps if local else partial(ddp.attach, compression="best", delay=1)
    sync = make(model=net, optimizer=optimizer, every=4, **({"delay": 4} if local else {}))
    train(net, optimizer, 0, 11)
    monkeypatch.setattr(Carrier, "begin", lambda *_: {}["rank 1"])
    with contextlib.suppress(KeyError):  # this step may know it
        train(net, optimizer, 0, 1)
    while not sync.starter._shared.failure:
        time.sleep(0.01)
    with pytest.raises(KeyError, match="rank 1"):
        train(net, optimizer, 0, 1)


def test_a_parameter_that_is_replaced_is_named(mesh):
    net = net_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp.attach(net, "topk:density=0.5", optimizer)
    train(net, optimizer, 0, 1)
    net[2].bias = optimizer.param_groups[0]["params"][3] = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UnsupportedError, match=r"2\.bias of the model was replaced .* attach it again"):
        train(net, optimizer, 0, 1)
    ddp.attach(net, "topk:density=0.5", optimizer)
    train(net, optimizer, 0, 1)


def test_a_group_that_is_made_when_another_was_destroyed_has_its_own_rank():
    for rank in (1, 0):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        assert _construction_errors(dist.group.WORLD)._ranks(None) == (rank, [0, 1])
        group = dist.new_group([0, 1])
        wrapper = DistributedDataParallel(net_of(), process_group=group)
        local = partial(ddp.LocalSteps, "no optimizer", every=2)
        for fails in (
            partial(ddp.attach, net_of(), "no text", replicas=group),
            partial(local, net_of(), process_group=group),
            partial(ddp.attach, wrapper.module, "no text"),
            partial(local, wrapper.module),
        ):
            with pytest.raises(HorovodSparseError):
                fails()
            errors = _construction_errors(group)  # who waits for these ranks looks there
            assert errors._told == (rank, [0, 1])
            errors.withdraw_error()
        dist.destroy_process_group()


def test_trainers_that_know_no_other_rank_are_refused_in_a_launch(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(TrainerCallback=object))
    sparse, arguments = transformers_callback("best"), SimpleNamespace(world_size=1)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    sparse.on_train_begin(arguments, None, None)
    assert sparse.sync is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="use_cpu=True"):
        sparse.on_train_begin(arguments, None, None)
