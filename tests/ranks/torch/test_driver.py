"""The driver on real ranks: every kind of request, within process sets, in any order."""

import os
import time

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_sparse.collectives import AllGather, AllReduce, Exchange
from horovod_sparse.errors import CollectiveMismatchError, DeadlineError
from horovod_sparse.torch.driver import HorovodDriver
from horovod_sparse.training.deadline import Deadline

pytestmark = pytest.mark.controllers


def rounds(rank: int, seed: int, number: int):
    value = np.array([float(rank + seed)])
    for _ in range(number):
        value = yield AllReduce(value)
        yield AllGather(np.zeros(rank, np.int32))
    return float(value[0])


def test_waiting_is_counted_and_advancing_is_not_waiting(rank, size):
    driver = HorovodDriver()
    hvd.barrier()
    if rank == 0:
        time.sleep(0.3)  # the others have nothing to do for as long
    task = driver.start("late", rounds(rank, 0, 1))
    before = time.perf_counter()
    driver.advance()
    assert time.perf_counter() - before < 0.1, "advance blocks"
    driver.wait([task])
    assert task.waited_seconds == pytest.approx(driver.idle_seconds)
    assert (task.waited_seconds > 0.2) == (rank != 0)


def test_a_message_that_nobody_awaits_is_a_named_error(rank, size):
    """In the same exchange, or, where a message may come after its end, in the next one of that name."""

    def wrong():
        yield Exchange({(rank + 1) % size: np.ones(1, np.int32)}, ())

    driver = HorovodDriver()
    errors = []
    for _ in range(3):
        task = driver.start("wrong", wrong())
        driver.wait()
        errors.append(task.error)
        hvd.barrier()
        time.sleep(0.02)
    found = [error for error in errors if error is not None]
    assert found and all(isinstance(error, CollectiveMismatchError) for error in found)
    assert "sent to it too" in str(found[0])
    driver.clear()  # what is still on its way must not meet the next test


def test_waiting_for_a_rank_that_does_not_come_is_an_error(rank, size):
    driver, begun = HorovodDriver(deadline_seconds=1.0), time.perf_counter()

    def twice():
        yield AllReduce(np.ones(1))
        return (yield AllReduce(np.ones(1)))

    if rank < size - 1:
        task = driver.start("late", twice())
        with pytest.raises(DeadlineError, match=r"round 1 of late has waited 1 s") as error:
            driver.wait([task])
        assert time.perf_counter() - begun < 5 and task.done and not driver.parked
        known = "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ
        assert error.value.missing == ({size - 1: ""} if known else None)
    else:
        driver.wait([driver.start("late", one_round())])  # the first round of two
        time.sleep(2.5)
        hvd.allreduce(torch.ones(1, dtype=torch.float64), op=hvd.Sum, name="late.1")
    hvd.barrier()


def one_round():
    yield AllReduce(np.ones(1))


def test_time_in_which_this_process_was_stopped_is_no_waiting(rank, size):
    deadline = Deadline(60, lambda: (rank, list(range(size))))
    looks = [*range(10), *range(3_000, 3_040)]  # stopped for most of an hour, like the other ranks
    for waited in looks:
        deadline.check(waited, "late", 1)
    with pytest.raises(DeadlineError, match="has waited 60 s"):
        for waited in range(3_040, 3_060):
            deadline.check(waited, "late", 1)
    for waited in (0.001, 59.0, 61.0):  # another wait
        deadline.check(waited, "later", 1)
