"""The driver on real ranks: every kind of request, within process sets, in any order."""

from __future__ import annotations

import os
import random
import time
import warnings

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_sparse.collectives import AllGather, AllReduce, AllToAll, Broadcast, Exchange
from horovod_sparse.errors import CollectiveMismatchError, DeadlineError
from horovod_sparse.torch.driver import HorovodDriver
from horovod_sparse.training.deadline import Deadline

pytestmark = pytest.mark.controllers


def all_kinds(rank: int, size: int):
    """Yields every kind of request; ranks count within the process set."""
    readonly = np.arange(2 * rank, dtype=np.int32)
    readonly.flags.writeable = False
    result = {"gathered": (yield AllGather(readonly))}
    result["nothing"] = yield AllGather(np.empty(0, np.int32))
    for dtype in (np.float32, np.float64):
        given = np.full(3, rank + 0.5, dtype)
        result[dtype.__name__] = yield AllReduce(given)
        assert (given == rank + 0.5).all(), "the request's buffer is not written to"
    for root in range(size):
        result["root", root] = yield Broadcast(np.full(2, float(rank)), root)
    result["toall"] = yield AllToAll(
        tuple(np.full(to + rank, 10 * rank + to, np.int32) for to in range(size))
    )
    result["empty"] = yield AllToAll(tuple(np.empty(0, np.int32) for _ in range(size)))
    right, left = (rank + 1) % size, (rank - 1) % size
    result["ring"] = yield Exchange({right: np.full(rank + 1, rank, np.int32)}, (left,))
    return result


def check_all_kinds(result, rank: int, size: int) -> None:
    expected = np.concatenate([np.arange(2 * r) for r in range(size)])
    np.testing.assert_array_equal(result["gathered"], expected)
    assert result["gathered"].dtype == np.int32 and result["nothing"].size == 0
    for dtype in (np.float32, np.float64):
        total = sum(r + 0.5 for r in range(size))
        np.testing.assert_array_equal(result[dtype.__name__], np.full(3, total, dtype))
        assert result[dtype.__name__].dtype == dtype
    for root in range(size):
        assert result["root", root].tolist() == [root, root]
    for sender, message in enumerate(result["toall"]):
        assert message.tolist() == [10 * sender + rank] * (rank + sender)
    assert [message.size for message in result["empty"]] == [0] * size
    left = (rank - 1) % size
    assert {peer: message.tolist() for peer, message in result["ring"].items()} == {left: [left] * (left + 1)}


@pytest.mark.parametrize("members", ["all", "first and last", "last"])
def test_every_kind_of_request(members, rank, size, process_set):
    ranks = {"all": list(range(size)), "first and last": sorted({0, size - 1}), "last": [size - 1]}[members]
    chosen = process_set(ranks)
    if rank not in ranks:
        return
    driver = HorovodDriver(chosen)
    inner = ranks.index(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of memory that is read-only
        tasks = [driver.start(f"kinds{i}", all_kinds(inner, len(ranks))) for i in range(3)]
        driver.wait()
    for task in tasks:
        check_all_kinds(task.value(), inner, len(ranks))
        assert task.num_rounds == 7 + len(ranks) and task.finished >= task.started
    assert not driver.parked


def rounds(rank: int, seed: int, number: int):
    """As many dependent rounds as asked for; the answer of one is in the next."""
    value = np.array([float(rank + seed)])
    for _ in range(number):
        value = yield AllReduce(value)
        yield AllGather(np.zeros(rank, np.int32))
    return float(value[0])


def test_order_is_free(rank, size):
    """Every rank starts, advances and waits in an order of its own."""
    driver, shuffle = HorovodDriver(), random.Random(rank)
    for _ in range(10):
        names = list(range(15))
        shuffle.shuffle(names)
        tasks = {}
        for number in names:
            tasks[number] = driver.start(f"order{number}", rounds(rank, number, 1 + number % 4))
            if shuffle.random() < 0.3:
                driver.advance()
        shuffle.shuffle(names)
        for number in names:
            driver.wait([tasks[number]])
            first = sum(r + number for r in range(size))
            assert tasks[number].value() == first * size ** (number % 4)
    assert not driver.parked


def test_an_error_ends_its_task_alone(rank, size):
    def failing():
        yield AllReduce(np.ones(1))
        raise KeyError("of this task")

    driver = HorovodDriver()
    bad = driver.start("bad", failing())
    good = driver.start("good", rounds(rank, 1, 3))
    driver.wait()  # raises nothing
    assert isinstance(bad.error, KeyError) and bad.done
    with pytest.raises(KeyError, match="of this task"):
        bad.value()
    assert good.value() == sum(r + 1 for r in range(size)) * size**2


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


def test_a_failure_of_horovod_comes_out_of_wait(rank, size):
    """Ranks that disagree about a length: everything in flight ends, and names are free again."""

    def disagreeing():
        yield AllReduce(np.ones(1 + rank))

    driver = HorovodDriver()
    tasks = [driver.start("fine", rounds(rank, 0, 50)), driver.start("disagreeing", disagreeing())]
    with pytest.raises(hvd.HorovodInternalError, match=r"(?i)mismatched"):
        driver.wait()
    assert all(isinstance(task.error, hvd.HorovodInternalError) for task in tasks)
    assert not driver.parked
    hvd.barrier()
    again = driver.start("disagreeing", rounds(rank, 0, 1))
    driver.wait()
    assert again.value() == sum(range(size))


def test_waiting_for_a_rank_that_does_not_come_is_an_error(rank, size):
    """The others say for what they wait, where `horovodrun` has started them; the last one comes too late."""
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
