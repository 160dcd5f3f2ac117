"""The driver on real ranks: every kind of request, within process sets, in any order."""

import os
import time

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_sparse.collectives import AllGather, AllReduce
from horovod_sparse.errors import DeadlineError
from horovod_sparse.torch.driver import HorovodDriver

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
