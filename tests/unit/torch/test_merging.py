"""How the optimizer makes its plan: what its arguments lead to without a launch, and what hooks measure."""

import dataclasses
import itertools

import pytest
import torch

hvd = pytest.importorskip("horovod_sparse.torch")

from horovod_sparse.cost import Fit, Profile  # noqa: E402
from horovod_sparse.errors import ArgumentError, ProfileMismatchError  # noqa: E402
from horovod_sparse.merging import Plan  # noqa: E402
from horovod_sparse.tensors.measuring import HostStamps  # noqa: E402

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
PROFILE = Profile(
    size=2,
    framework="torch",
    controller="gloo",
    cycle_seconds=0.001,
    collectives={"allgather": Fit(1e-3, 1e-8), "allreduce": Fit(1e-3, 1e-8)},
    selection={"topk": Fit(1e-5, 1e-9)},
    backward_seconds=dict.fromkeys(NAMES, 1e-3),
)

NO_TIMES = dataclasses.replace(PROFILE, backward_seconds={})


@pytest.fixture(autouse=True)
def one_rank_that_synchronizes(monkeypatch):
    hvd.init()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # hooks are then registered with one rank, too


def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))


def wrap(net, compression="topk:density=0.5", **arguments):
    base = torch.optim.SGD(net.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(
        base, named_parameters=net.named_parameters(), compression=compression, **arguments
    )


def train(net, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(4, 8)).sum().backward()
        optimizer.step()


def test_replanning_without_a_plan_needs_a_way_to_make_one():
    optimizer = wrap(model())
    with pytest.raises(ArgumentError, match="merging='optimal'"):
        optimizer.replan()
    with pytest.raises(ArgumentError, match="measure_steps"):
        optimizer.replan(Plan((NAMES,)), measure_steps=3)
    asked = wrap(model(), merging="optimal")
    with pytest.raises(ArgumentError, match="measure_steps"):
        asked.replan(measure_steps=0)
    with pytest.raises(ProfileMismatchError, match="train a few steps first"):
        wrap(model(), merging="optimal", profile=NO_TIMES).replan()


def test_hooks_measure_the_backward_of_every_parameter(monkeypatch):
    """Backward alone makes the clock go on, but for a little at every look: hooks find which layer it was."""
    seconds, tick = {"0.weight": 0.004, "2.weight": 0.002}, 1e-6
    clock = itertools.count()  # looks
    passed = [0.0]
    monkeypatch.setattr(HostStamps, "now", lambda stamps: passed[0] + tick * next(clock))

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(context, parameter, name):
            context.name = name
            return parameter.clone()

        @staticmethod
        def backward(context, gradient):
            passed[0] += seconds[context.name]
            return gradient, None

    net = model()
    optimizer = wrap(net, merging="optimal", profile=NO_TIMES)
    for _ in range(7):
        optimizer.zero_grad()
        first = Slow.apply(net[0].weight, "0.weight")
        second = Slow.apply(net[2].weight, "2.weight")
        hidden = torch.nn.functional.linear(torch.ones(4, 8), first, net[0].bias).relu()
        torch.nn.functional.linear(hidden, second, net[2].bias).sum().backward()
        optimizer.step()
    optimizer.replan()
    found = optimizer.decision.profile.backward_seconds
    assert sorted(found) == sorted(NAMES)
    for name, value in seconds.items():
        assert value <= found[name] <= value + 4 * tick
    assert found["0.bias"] <= 4 * tick
    assert optimizer.decision.profile.forward_seconds > 0.0
    assert optimizer.plan == optimizer.decision.plan
