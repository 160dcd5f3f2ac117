"""Horovod and torch.distributed in the same processes: local steps and states are the same, bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.torch as hvd
from horovod_sparse import ddp
from horovod_sparse.errors import DriftError, StateMismatchError, UnsupportedError
from horovod_sparse.merging import Plan
from support.dyadic import gradients_for
from support.linear import LinearModel
from support.optimizers import make, train_step
from support.replicas import Replica, same_on_all_replicas

pytestmark = pytest.mark.usefixtures("process_group")
WAYS: dict[str, dict[str, Any]] = {
    "dense": {"outer": "nesterov"},
    "sparseloco": {"compression": "sparseloco"},
    "ranks": {"compression": "topk:density=0.1", "combine": "ranks"},
    "several rounds": {"compression": "oktopk:density=0.1"},
    "delay": {"compression": "sparseloco", "delay": 2},
}


class Training:
    """A model with statistics of batches, AdamW, and local steps over one of the engines."""

    def __init__(self, kind: str, seed: int = 0, **given: Any) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(40, 60), nn.BatchNorm1d(60), nn.Tanh(), nn.Linear(60, 3))
        self.model: nn.Module = DistributedDataParallel(self.net) if kind == "ddp" else self.net
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        make: Any = ddp.LocalSteps if kind == "ddp" else hvd.LocalSteps
        self.local = make(self.optimizer, self.model, **{"every": 3, **given})
        self.steps = 0

    def train(self, rank: int, num_steps: int) -> None:
        for _ in range(num_steps):
            random = np.random.default_rng([rank, self.steps])
            inputs = torch.from_numpy(random.standard_normal((8, 40)).astype(np.float32))
            self.optimizer.zero_grad()
            self.model(inputs).sub(inputs[:, :3]).square().mean().backward()
            self.optimizer.step()
            self.steps += 1

    def vector(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.net.parameters()).detach().clone()


@pytest.mark.parametrize("way", WAYS)
def test_both_engines_do_the_same(way, rank, size):
    one, other = (Training(kind, **WAYS[way]) for kind in ("ddp", "horovod"))
    for number in range(4):
        for training in (one, other):
            training.train(rank, 2 + number % 2)
        assert torch.equal(one.vector(), other.vector())
        if number == 0:
            assert not same_on_all_replicas(one.vector())  # no gradient was synchronized
    for training in (one, other):
        training.train(rank, 3 * (rank == 1))  # ranks that have come to other ends end together
        training.local.finish()
        assert same_on_all_replicas(training.vector(), *training.net.buffers())
    assert torch.equal(one.vector(), other.vector())
    mean = one.local.telemetry.mean
    assert mean is not None
    assert mean.saving > (20 if "sparseloco" in way else 0.9)


@pytest.mark.parametrize("kind", ["horovod", "ddp"])
def test_ranks_that_begin_apart_are_told_in_the_first_step(kind, rank):
    with pytest.raises(StateMismatchError, match="every differs"):
        Training(kind, every=3 + rank).train(rank, 1)
    if kind == "ddp":
        model = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
        former, optimizer = ddp.attach(model, "topk:density=0.5"), torch.optim.SGD(model.parameters())
        local = ddp.LocalSteps(optimizer, model, every=2)  # takes the place of what was attached
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert (former.step, local.step) == (0, 1)
        with pytest.raises(UnsupportedError, match="end LocalSteps"):
            model = DistributedDataParallel(nn.Linear(2, 2))
            compiled = torch.compile(model, backend="eager")
            ddp.LocalSteps(torch.optim.SGD(model.parameters()), compiled, every=2)
            ddp.attach(model, "topk:density=0.5")
        model = DistributedDataParallel(nn.Linear(2, 2))
        weight, bias = (torch.optim.SGD([parameter]) for parameter in model.parameters())
        local = ddp.LocalSteps(weight, model, every=2)
        model.module.bias.data += 1.0  # loaded, and trained by nobody so far
        with pytest.raises(UnsupportedError, match=r"LocalSteps\(other_optimizer, model, every=2\)"):
            for number in range(4):
                model(torch.ones(1, 2)).sum().backward()
                if number > 1:
                    bias.step()
                weight.step()
        assert local.step == 1
        with pytest.raises(UnsupportedError, match=r"join\(\) fills in for ranks"), model.join():
            model(torch.ones(1, 2))
        return
    with pytest.raises(DriftError, match=r"0\.weight"):
        Training(kind, seed=rank).train(rank, 1)


SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11)}
PLAN = Plan((("second", "bias"), ("first",)))
gradients = gradients_for(SHAPES)


@pytest.mark.parametrize(
    "text", ["topk:density=0.1", "exdyna:density=0.1", "dgc:density=0.1,feedback=momentum"]
)
def test_each_loads_what_the_other_has_saved(text, rank, size):
    model, replica = LinearModel(SHAPES), Replica(SHAPES, text, plan=PLAN)
    optimizer = make(model, text, plan=PLAN)
    for step in range(3):
        train_step(model, optimizer, gradients(rank, step))
    replica.net.load_state_dict(model.state_dict())
    replica.sync.load_state_dict(optimizer.state_dict()["horovod_sparse"])
    for step in range(3, 6):
        one, other = train_step(model, optimizer, gradients(rank, step)), replica.step(gradients(rank, step))
        assert all(torch.equal(one[name], other[name]) for name in SHAPES), step
    later = LinearModel(SHAPES)
    again = make(later, text, plan=PLAN)
    later.load_state_dict(replica.net.state_dict())
    again.load_state_dict(again.state_dict() | {"horovod_sparse": replica.sync.state_dict()})
    for step in range(6, 9):
        one, other = train_step(later, again, gradients(rank, step)), replica.step(gradients(rank, step))
        assert all(torch.equal(one[name], other[name]) for name in SHAPES), step
    assert replica.sync.step == 9
