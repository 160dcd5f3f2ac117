"""The driver on real ranks: messages of pairs by MPI and by Horovod's all-to-all, and waiting for ranks."""

import os
import random
import time
from unittest.mock import Mock

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from conformance.engine import given, replicas_agree, run
from conformance.engines_torch import ENGINES
from horovod_sparse.collectives import AllGather, AllReduce, Exchange
from horovod_sparse.errors import CollectiveMismatchError, DeadlineError, NonFiniteGradientError
from horovod_sparse.torch import driver as of_torch

pytestmark = pytest.mark.controllers


def needs_mpi():
    if not hvd.mpi_enabled():
        pytest.skip("refused where Horovod runs on Gloo")


@pytest.fixture(params=["auto", "alltoall", "pairs"])
def way(request, monkeypatch):
    if request.param == "pairs":
        needs_mpi()
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", request.param)
    return request.param


@pytest.fixture
def each_way_once(way):
    """For long tests: two ways are the same, with MPI and without."""
    if way == "auto":
        pytest.skip('what "alltoall" or "pairs" does')
    return way


def carrier(way: str) -> str:
    has_mpi = hvd.mpi_enabled() and hvd.mpi_threads_supported()
    return "mpi" if has_mpi and way != "alltoall" else "alltoall"


def connected() -> of_torch.HorovodDriver:
    made = of_torch.HorovodDriver()
    made.choose_transport()
    return made


def ring(rank: int, size: int, length: int, rounds: int):
    seen = []
    for number in range(rounds):
        distance = 1 + number % (size - 1)
        message = np.full(length * (rank + 1) + number, rank, np.int32)
        arrived = yield Exchange({(rank + distance) % size: message}, ((rank - distance) % size,))
        seen.append({source: (words.size, set(words.tolist())) for source, words in arrived.items()})
    return seen


def of_all_kinds(rank: int, size: int, number: int):
    heard = yield from ring(rank, size, 200_000 if number % 5 == 0 else number, 1 + number % 4)
    value = np.array([float(rank + number)])
    for _ in range(1 + number % 4):
        value = yield AllReduce(value)
        yield AllGather(np.zeros(rank, np.int32))
    return heard, float(value[0])


def test_many_rounds_in_any_order(each_way_once, monkeypatch, rank, size):
    driver, shuffle = connected(), random.Random(rank)
    if each_way_once == "pairs":
        monkeypatch.setattr("horovod_sparse.torch.driver._start_native", lambda *_: pytest.fail("Horovod's"))
    for _ in range(4):
        names = list(range(12))
        shuffle.shuffle(names)
        tasks = {}
        for number in names:
            tasks[number] = driver.start(f"many{number}", of_all_kinds(rank, size, number))
            if shuffle.random() < 0.3:
                driver.advance()
        shuffle.shuffle(names)
        for number in names:
            driver.wait([tasks[number]])
            length = 200_000 if number % 5 == 0 else number
            heard, total = tasks[number].value()
            for turn, arrived in enumerate(heard):
                source = (rank - 1 - turn % (size - 1)) % size
                count = length * (source + 1) + turn
                assert arrived == {source: (count, {source} if count else set())}
            assert total == sum(r + number for r in range(size)) * size ** (number % 4)
    assert not driver.parked


def test_nothing_is_taken_for_a_message_of_a_new_start(way, rank, size):
    if carrier(way) == "alltoall":
        pytest.skip("Horovod keeps its own collectives apart")

    def talk(word: int, rounds: int):
        heard = []
        for _ in range(rounds):
            message = np.full(3, word, np.int32)
            heard.append((yield Exchange({(rank + 1) % size: message}, ((rank - 1) % size,))))
        return heard

    driver = connected()
    # rank 0 never starts the second round, in which the others have sent already
    task = driver.start("given up", talk(1, 1 if rank == 0 else 2))
    while task.num_rounds < 2 and not task.done:
        driver.advance()
        time.sleep(1e-4)
    hvd.barrier()
    driver.clear()
    hvd.barrier()
    again = driver.start("given up", talk(2, 2))
    driver.wait([again])
    heard = [int(words[0]) for arrived in again.value() for words in arrived.values()]
    assert heard == [2, 2]


def test_a_message_that_nobody_awaits_is_a_named_error(each_way_once, rank, size):
    """In the same exchange, or, where a message may come after its end, in the next one of that name."""

    def wrong():
        yield Exchange({(rank + 1) % size: np.ones(1, np.int32)}, ())

    driver, errors = connected(), []
    for _ in range(3):
        task = driver.start("wrong", wrong())
        driver.wait([task])
        errors.append(task.error)
        hvd.barrier()
        time.sleep(0.02)
    found = [error for error in errors if error is not None]
    assert found and all(isinstance(error, CollectiveMismatchError) for error in found)
    assert f"ranks [{(rank - 1) % size}]" in str(found[0])
    driver.clear()  # what is still on its way must not meet the next test


def test_starting_waits_for_nobody(way, rank, size):
    driver, late = connected(), size - 1
    task = driver.start("waits", ring(rank, size, 9, 2)) if rank != late else None
    driver.advance()
    hvd.barrier()
    driver.advance()
    # the rank behind the late one cannot have its message yet; the others may go on
    assert rank != 0 or task is None or not task.done
    hvd.barrier()
    if task is None:
        task = driver.start("waits", ring(rank, size, 9, 2))
    driver.wait([task])
    assert task.value()[0] == {(rank - 1) % size: (9 * ((rank - 1) % size + 1), {(rank - 1) % size})}


def test_telemetry_says_which_and_why(way, rank, size):
    reason = "HOROVOD_SPARSE_TRANSPORT says so" if way == "alltoall" else "Horovod does not run on MPI"
    of_mpi, other = "MPI, on a communicator of their own (every rank can)", f"Horovod's all-to-all ({reason})"
    found = {}
    for name in ("spardl", "topk"):
        for engine in ENGINES:
            training = engine.train(f"{name}:density=0.1", {f"{name}_{engine.name}": (20, 2)})
            training.step({f"{name}_{engine.name}": np.ones((20, 2))})
            found[name, engine.name] = which = training.telemetry.transport
            assert training.telemetry.summary().endswith(f"; pairs of ranks by {which}") == (which != "")
    assert {found["spardl", one.name] for one in ENGINES} == {of_mpi if carrier(way) == "mpi" else other}


def test_facts_of_a_pass_keep_their_length(monkeypatch):
    """Horovod negotiates a message of another length anew."""
    start = Mock(wraps=of_torch._start_native)
    monkeypatch.setattr(of_torch, "_start_native", start)
    run(ENGINES[0].train("best:density=0.1", delay=1, check_every=0), ENGINES[0], range(9))
    lengths = [call.args[0].buffer.size for call in start.call_args_list if ".facts" in call.args[1]]
    assert len(lengths) == 9 and len(set(lengths)) == 1


@pytest.mark.parametrize("name", ["exdyna", "gtopk", "oktopk"])
def test_a_step_that_all_give_up_leaves_the_others_their_messages(monkeypatch, name, rank, size):
    needs_mpi()
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", "pairs")
    sick, well = (ENGINES[0].train(f"{name}:density=0.1") for _ in range(2))
    for training in (sick, well):
        training.step(given(rank, 0))
    for step in (1, 2):
        bad = given(rank, step)
        well.loss(given(rank, step)).backward()
        if rank == size - 1:
            time.sleep(0.2)
            bad["second"].reshape(-1)[3] = np.nan
        with pytest.raises(NonFiniteGradientError, match=f"rank {size - 1}"):
            sick.step(bad)
        well.optimizer.step()
        well.optimizer.zero_grad()
    for training in (sick, well):
        training.step(given(rank, 3))
        assert replicas_agree(ENGINES[0], training)


def sums(rounds: int):
    for _ in range(rounds):
        yield AllReduce(np.ones(1))


def test_waiting_for_a_rank_that_does_not_come_is_an_error(rank, size):
    driver = of_torch.HorovodDriver(deadline_seconds=1.0)
    hvd.barrier()
    if rank < size - 1:
        task = driver.start("late", sums(2))
        with pytest.raises(DeadlineError, match=r"round 1 of late has waited 1 s") as error:
            driver.wait([task])
        assert task.done and not driver.parked
        known = "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ
        assert error.value.missing == ({size - 1: ""} if known else None)
    else:
        driver.wait([driver.start("late", sums(1))])
    hvd.allreduce(torch.ones(1), name="the others have raised")
    if rank == size - 1:
        hvd.allreduce(torch.ones(1, dtype=torch.float64), op=hvd.Sum, name="late.1")
    hvd.barrier()
