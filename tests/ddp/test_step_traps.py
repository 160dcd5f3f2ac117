"""Parameters of other types, with gaps in memory, and ones that join while moves are under way."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss

from horovod_sparse import ddp
from horovod_sparse.errors import UnsupportedError
from support.replicas import same_on_all_replicas

schedules = pytest.mark.parametrize(("every", "delay"), [(1, 0), (1, 1), (3, 0), (4, 1)])


def net_of() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))


def batches(rank: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(17 + rank)
    for _ in range(18):
        inputs = torch.randn(8, 12, generator=generator)
        yield inputs.to(dtype), torch.sin(3 * inputs[:, :3]).to(dtype)


@schedules
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_parameters_of_every_float_type_train(every, delay, dtype, rank):
    net = net_of().to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    sync = ddp.attach(net, "best:density=0.1", optimizer, every=every, delay=delay)
    for inputs, targets in batches(rank, dtype):
        optimizer.zero_grad()
        mse_loss(net(inputs), targets).backward()
        optimizer.step()
    sync.finish()
    assert same_on_all_replicas(*(one.detach().double() for one in net.parameters()))
    assert not torch.equal(net[0].weight, net_of().to(dtype)[0].weight)


@schedules
@pytest.mark.parametrize("how", ["thawed", "added"])
def test_parameters_join_while_moves_are_under_way(every, delay, how, rank):
    net = net_of()
    net[2].requires_grad_(how == "added")
    optimizer = torch.optim.AdamW((net[0] if how == "added" else net).parameters(), lr=1e-2)
    sync = ddp.attach(net, "best:density=0.1", optimizer, every=every, delay=delay)
    before = net[2].weight.detach().clone()
    for step, (inputs, targets) in enumerate(batches(rank)):
        if step == 6:
            net[2].requires_grad_(True)
            if how == "added":
                optimizer.add_param_group({"params": net[2].parameters()})
        optimizer.zero_grad()
        mse_loss(net(inputs), targets).backward()
        optimizer.step()
        with sync.common():
            assert same_on_all_replicas(*net.parameters())
    sync.finish()
    assert same_on_all_replicas(*net.parameters())
    assert not torch.equal(net[2].weight, before)


def test_a_parameter_with_gaps_in_memory_is_refused(rank):
    """Steps went into a copy of it, and it never moved."""
    net = torch.nn.Module()
    net.gaps = torch.nn.Parameter(torch.randn(8, 3)[::2])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp.attach(net, "topk:density=1.0,feedback=best", optimizer)
    net.gaps.sum().backward()
    with pytest.raises(UnsupportedError, match="gaps in memory"):
        optimizer.step()


def test_the_last_attach_has_the_optimizer(rank):
    """And a former one leaves nothing in flight: no step is taken twice."""
    ends = []
    for times in (1, 2):
        net = net_of()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        former = ddp.attach(net, "best:density=0.1", optimizer, delay=1) if times == 2 else None
        sync = ddp.attach(net, "best:density=0.1", optimizer)
        for inputs, targets in batches(rank):
            optimizer.zero_grad()
            mse_loss(net(inputs), targets).backward()
            optimizer.step()
        assert sync.step == 18 and (former is None or former.step == 0)
        ends.append([one.detach().clone() for one in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_a_parameter_that_is_used_late_takes_no_huge_step(rank):
    net = net_of()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    ddp.attach(net, "topk:density=1.0,feedback=adam(whole_batch=false)", optimizer)
    moved = []
    for step in range(60):
        for inputs, targets in batches(rank):
            before = net[2].weight.detach().clone()
            optimizer.zero_grad()
            mse_loss(net(inputs), targets).backward()
            if step < 2:
                net[2].weight.grad = None
            optimizer.step()
            moved.append(float((net[2].weight.detach() - before).abs().max()))
        if step == 3:
            break
    assert max(moved[:36]) == 0.0
    assert 0.0 < max(moved[36:]) < 5e-2
