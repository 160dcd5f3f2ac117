"""Whom a rank waits for over torch.distributed, and what it says of them."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch.distributed as dist

from horovod_sparse import ddp
from horovod_sparse.collectives import AllGather, AllReduce
from horovod_sparse.ddp.collectives import Carrier
from horovod_sparse.errors import (
    CollectiveMismatchError,
    DeadlineError,
    HorovodSparseError,
    UnknownNameError,
)
from horovod_sparse.merging import Plan
from support.linear import dyadic
from support.replicas import Replica

SHAPES = {"first": (40, 30), "bias": (7,)}


def gradients(rank: int) -> dict[str, np.ndarray]:
    return {name: dyadic(shape, rank, 0, name) for name, shape in SHAPES.items()}


@pytest.fixture(name="group")
def _group(size: int) -> dist.ProcessGroup:
    """One that no other test uses: what is told there is told once."""
    return dist.new_group(range(size))


def test_who_has_not_attached_is_named(group, rank):
    replica = Replica(SHAPES, None, process_group=group)
    if rank == 0:
        ddp.attach(replica.model, "topk:density=0.1", deadline_seconds=1)
        with pytest.raises(DeadlineError, match=r"ranks \[1.*\], which have not attached"):
            replica.step(gradients(rank))


def test_who_could_not_attach_is_quoted(group, rank):
    replica, began = Replica(SHAPES, None, process_group=group), time.monotonic()
    if rank:
        with pytest.raises(UnknownNameError):
            ddp.attach(replica.model, "topk:densty=0.1")
        return
    ddp.attach(replica.model, "topk:density=0.1")
    with pytest.raises(HorovodSparseError, match=r"on rank 1: UnknownNameError: .*densty"):
        replica.step(gradients(rank))
    assert time.monotonic() - began < 10


def test_who_does_not_come_to_a_step_is_named(group, rank):
    plan = Plan((tuple(SHAPES),))  # one bucket: what rank 0 sends before its deadline is all that others need
    replica = Replica(SHAPES, "topk:density=0.1", plan=plan, process_group=group)
    for _ in range(2):  # in the second one DistributedDataParallel itself agrees on buckets
        replica.step(gradients(rank))
    if rank:
        time.sleep(3)
        replica.step(gradients(rank))
        return
    replica.sync.engine.communicator._deadline.seconds = 1.5  # kernels are compiled by now
    with pytest.raises(DeadlineError, match=r"has waited 1\.5 s for other ranks") as caught:
        replica.step(gradients(rank))
    assert 1 in caught.value.missing


@pytest.mark.parametrize("request_of", [AllGather, AllReduce])
def test_ranks_out_of_step_are_told_apart(request_of, group, rank):
    carrier = Carrier(group)
    carrier.name = "drift"
    carrier(request_of(np.zeros(5, np.int32)))
    carrier.name = "agreement" if rank else "drift"
    with pytest.raises(CollectiveMismatchError, match=r"this one is at (drift|agreement)"):
        carrier(request_of(np.zeros(5, np.int32)))
