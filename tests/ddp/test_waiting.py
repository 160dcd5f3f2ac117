"""Requests over torch.distributed: messages of any length, whom a rank waits for, and what it says."""

from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from horovod_sparse import ddp
from horovod_sparse.collectives import AllGather, AllReduce, AllToAll, Broadcast, Exchange
from horovod_sparse.ddp.collectives import Carrier
from horovod_sparse.ddp.distributed_engine import await_first_step
from horovod_sparse.errors import CollectiveMismatchError, DeadlineError
from horovod_sparse.merging import Plan
from support.dyadic import gradients_for
from support.replicas import Replica

SHAPES = {"first": (40, 30), "bias": (7,)}
gradients = gradients_for(SHAPES)


@pytest.fixture(name="group")
def _group(size: int) -> dist.ProcessGroup:
    """Returns one that no other test uses, since errors and first steps are published once in a group."""
    return dist.new_group(range(size), timeout=timedelta(seconds=60))


@pytest.mark.parametrize("came", [False, True])
def test_who_has_not_come_or_connected_is_named(came, group, rank):
    replica = Replica(SHAPES, None, process_group=group)
    if rank == 0:
        ddp.attach(replica.model, "topk:density=0.1", deadline_seconds=1)
        match = "rank 1 does not wait" if came else r"ranks \[1.*\] have not begun"
        with pytest.raises(DeadlineError, match=match):
            replica.step(gradients(rank, 0))
    elif came:  # and ends before it connects
        await_first_step(group, 60)


def test_who_does_not_come_to_a_step_is_named(group, rank):
    plan = Plan((tuple(SHAPES),))  # one bucket: what rank 0 sends before its deadline is all that others need
    replica = Replica(SHAPES, "topk:density=0.1", plan=plan, process_group=group)
    for _ in range(2):  # in the second one DistributedDataParallel itself agrees on buckets
        replica.step(gradients(rank, 0))
    store = dist.distributed_c10d._get_default_store()
    if rank:
        store.wait(["rank 0 has raised"])
        replica.step(gradients(rank, 0))
        return
    for seconds in (1.5, 60):  # kernels are compiled by now; a later step does not wait again
        replica.sync.engine.communicator._deadline.seconds = seconds
        with pytest.raises(DeadlineError, match=r"has waited 1\.5 s for other ranks \(.*rank 1 "):
            replica.step(gradients(rank, 0))
    store.set("rank 0 has raised", "")


@pytest.mark.parametrize("request_of", [AllGather, AllReduce])
def test_ranks_out_of_step_are_told_apart(request_of, group, rank):
    carrier = Carrier(group)
    carrier.name = "drift"
    carrier(request_of(np.zeros(5, np.int32)))
    carrier.name = "agreement" if rank else "drift"
    with pytest.raises(CollectiveMismatchError, match=r"this one is at (drift|agreement)"):
        carrier(request_of(np.zeros(5, np.int32)))
    dist.barrier()  # a carrier that is freed closes connections to ranks that have not raised yet


#: words, step after step: below and above what the other end expects, and nothing
LENGTHS = [0, 1, 1023, 1024, 1025, 5000, 7500, 7501, 3, 0, 200_000, 900, 900, 150_000, 400_000, 1]


def words(sender: int, receiver: int, step: int) -> np.ndarray:
    """What one rank says to another: of another length for each."""
    length = LENGTHS[(step + 3 * sender + 5 * receiver) % len(LENGTHS)]
    return np.random.default_rng([sender, receiver, step]).integers(-(2**31), 2**31, length).astype(np.int32)


@pytest.mark.controllers
def test_everyone_gets_every_message(rank, size):
    """Pairs may have had other numbers of messages: as where hosts have different numbers of ranks."""
    carrier = Carrier(None)
    for step in range(2 * len(LENGTHS)):
        own = words(rank, 0, step)
        own.flags.writeable = False
        found = carrier(AllGather(own))
        np.testing.assert_array_equal(found, np.concatenate([words(r, 0, step) for r in range(size)]))
        to, source = (rank + 1 + step) % size, (rank - 1 - step) % size
        found = carrier(Exchange({to: words(rank, to, step)}, (source,)))
        assert list(found) == [source]
        np.testing.assert_array_equal(found[source], words(source, rank, step))
        for r, message in enumerate(carrier(AllToAll(tuple(words(rank, r, step) for r in range(size))))):
            np.testing.assert_array_equal(message, words(r, rank, step))
        total = carrier(AllReduce(np.full(5, rank + step, np.float64)))
        assert total.tolist() == [sum(r + step for r in range(size))] * 5
        found = carrier(Broadcast(np.full(3, rank, np.int32), size - 1))
        assert found.tolist() == [size - 1] * 3
        if rank < 2:
            found = carrier(Exchange({1 - rank: words(rank, 1 - rank, step)}, (1 - rank,)))
            np.testing.assert_array_equal(found[1 - rank], words(1 - rank, rank, step))
