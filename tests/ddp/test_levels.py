"""Two levels behind DistributedDataParallel: dense within hosts, sparse between them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist

from horovod_sparse import ddp
from horovod_sparse.errors import ArgumentError, NonFiniteGradientError, StateMismatchError, UnknownNameError
from horovod_sparse.frontend.shared_memory import MEMORY_VARIABLE, lends
from horovod_sparse.merging import Plan
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.topology import Topology
from support.linear import dyadic
from support.optimizers import flat, in_bucket_order
from support.replicas import Replica, same_on_all_replicas

SHAPES = {"first": (40, 30), "bias": (7,), "second": (3, 5, 11), "one": (1,)}
PLAN = Plan((("one", "second"), ("bias",), ("first",)))


def gradients(rank, step):
    return {name: dyadic(shape, rank, step, name) for name, shape in SHAPES.items()}


@pytest.fixture(autouse=True)
def per_host(monkeypatch, size):
    """Two ranks on a host, or all of them where that leaves a host with fewer."""
    number = 2 if size % 2 == 0 else size
    monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", str(number))
    return number


def made(text, levels="host", plan=None):
    return Replica(SHAPES, text, plan=plan, attached={"levels": levels})


@pytest.mark.parametrize("algorithm", ["topk", "exdyna", "spardl", "cltk"])
def test_equals_the_simulator_bit_for_bit(algorithm, rank, size, per_host):
    replica = made(f"{algorithm}:density=0.1", plan=PLAN)
    topology = Topology.regular(size // per_host, per_host)
    clusters = {
        names: SimulatedCluster(
            replica.sync.recipe,
            sum(int(np.prod(SHAPES[name])) for name in names),
            size,
            name=f"bucket{number}.{names[0]}",
            topology=topology,
        )
        for number, names in enumerate(PLAN.buckets)
    }
    for step in range(4):
        found = replica.step(gradients(rank, step))
        for names, cluster in clusters.items():
            inputs = [in_bucket_order(gradients(r, step), names) for r in range(size)]
            wanted = cluster.step(inputs, 0.5) * np.float32(1.0 / size)
            if size in (2, 4):
                np.testing.assert_array_equal(flat(found, names), wanted)
            else:
                np.testing.assert_allclose(flat(found, names), wanted, rtol=1e-6, atol=1e-7)
    assert replica.sync.topology == topology
    for names, cluster in clusters.items():
        np.testing.assert_array_equal(flat(replica.held(), names), cluster.residuals()[rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shared_memory_gives_the_bits_that_messages_give(dtype, monkeypatch, rank):
    found = []
    for memory in ("0", "1"):
        monkeypatch.setenv(MEMORY_VARIABLE, memory)
        replica = Replica(SHAPES, "topk:density=0.1", plan=PLAN, dtype=dtype, attached={"levels": "host"})
        arrays = []
        for step in range(3):
            generator = np.random.default_rng([rank, step])
            given = {name: generator.standard_normal(shape) for name, shape in SHAPES.items()}
            arrays += [value.clone() for value in replica.step(given).values()]
        assert lends(replica.sync.parts) == (memory == "1")
        found.append([*arrays, *replica.held().values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_gradient_that_is_not_finite_is_told_to_all(rank, size, per_host):
    replica = made("exdyna:density=0.2")
    replica.step(gradients(rank, 0))
    sick = gradients(rank, 1)
    if rank == size - 1:
        sick["first"] = np.full(SHAPES["first"], np.nan)
    with pytest.raises(NonFiniteGradientError) as raised:
        replica.step(sick)
    assert set(raised.value.where) == set(range(size - per_host, size))
    replica.optimizer.zero_grad()
    replica.step(gradients(rank, 2))
    assert same_on_all_replicas(*replica.net.parameters())


@pytest.mark.parametrize("way", [("flat", "host"), ("host", "flat"), ("host", "host")])
def test_a_checkpoint_loads_at_other_levels_with_nothing_lost(way, rank, size):
    replica = made("topk:density=0.05", way[0])
    for step in range(3):
        replica.step(gradients(rank, step))
    saved, held = copy.deepcopy(replica.sync.state_dict()), replica.held()
    other = made("topk:density=0.05", way[1])
    other.sync.load_state_dict(saved)
    found = other.step({name: np.zeros(shape) for name, shape in SHAPES.items()})
    for name, shape in SHAPES.items():
        before, after = held[name].double().clone(), other.held()[name].double().clone()
        dist.all_reduce(before)
        dist.all_reduce(after)
        now = size * found[name].double() + after.reshape(shape)
        torch.testing.assert_close(now, before.reshape(shape), rtol=1e-5, atol=1e-4)


def test_ranks_that_do_not_agree_are_told(rank):
    replica = made("topk:density=0.1", "flat" if rank == 0 else "host")
    with pytest.raises(StateMismatchError, match="levels differs"):
        replica.step(gradients(rank, 0))


def test_what_is_refused():
    with pytest.raises(UnknownNameError, match="levels"):
        made("topk", "two")
    with pytest.raises(ArgumentError, match="levels"):
        ddp.attach(torch.nn.Linear(2, 1), "topk", levels="host", replicas=dist.group.WORLD)
