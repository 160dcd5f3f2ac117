"""The hook: what is held back through changes of buckets, the raw pair of hook and state, and threads."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from horovod_sparse import ddp
from horovod_sparse.feedback import parse_recipe
from support.dyadic import gradients_for
from support.replicas import Replica, same_on_all_replicas

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11), "one": (1,)}
WAYS = {
    "as it is": {},
    "unused looked for": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
}
gradients = gradients_for(SHAPES)


@pytest.mark.parametrize("arguments", WAYS.values(), ids=WAYS)
def test_residuals_outlive_the_buckets(arguments, rank, size):
    """DistributedDataParallel changes its buckets after the first iteration: nothing is lost by that."""
    replica = Replica(SHAPES, "exdyna:density=0.1,densities={'second': 0.3}", **arguments)
    applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    given = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    plans = []
    for step in range(8):
        found = replica.step(gradients(rank, step))
        plans.append(replica.sync.plan)
        for name in SHAPES:
            applied[name] += found[name].double()
            given[name] += sum(gradients(r, step)[name] for r in range(size)) / size
        assert same_on_all_replicas(*found.values()), step
    if "find_unused_parameters" not in arguments:
        assert plans[0] != plans[-1]
    assert len(plans[-1].buckets) > 1
    assert plans[5] == plans[-1]
    held = replica.held()
    assert any(tensor.count_nonzero() for tensor in held.values())
    for name, shape in SHAPES.items():
        mean = held[name].double().reshape(shape).clone()
        dist.all_reduce(mean)
        total = applied[name] + mean / size
        torch.testing.assert_close(total, torch.from_numpy(np.asarray(given[name])), rtol=1e-5, atol=1e-5)


def test_the_raw_pair_does_the_same(rank):
    attached = Replica(SHAPES, "exdyna:density=0.1")
    plain = Replica(SHAPES, None)
    state = ddp.State(parse_recipe("exdyna:density=0.1"), named_parameters=plain.net.named_parameters())
    plain.model.register_comm_hook(state, ddp.hook)
    unnamed = Replica(SHAPES, None)
    other = ddp.State("exdyna:density=0.1")
    unnamed.model.register_comm_hook(other, ddp.hook)
    for step in range(5):
        one, two = attached.step(gradients(rank, step)), plain.step(gradients(rank, step))
        three = unnamed.step(gradients(rank, step))
        for name in SHAPES:
            assert torch.equal(one[name], two[name])
        assert same_on_all_replicas(*three.values())
    assert state.telemetry.last.bytes_sent == attached.sync.telemetry.last.bytes_sent
    assert sorted(other.state_dict()["residuals"]) == [f"allreduce.noname.0.{i}" for i in range(len(SHAPES))]


def test_a_model_that_is_gone_leaves_no_thread(rank):
    def threads() -> int:
        return sum(thread.name == "horovod_sparse.ddp" for thread in threading.enumerate())

    gc.collect()
    before = threads()
    replica = Replica(SHAPES, "topk:density=0.1")
    replica.step(gradients(rank, 0))
    assert threads() == before + 1
    gone = weakref.ref(replica.sync)
    del replica
    gc.collect()
    assert gone() is None
    assert threads() == before
