"""Messages between two ranks, over MPI and over Horovod's all-to-all: sparse all-reduces give one result."""

from __future__ import annotations

import random
import time
import zlib

import horovod.torch as hvd
import numpy as np
import pytest

from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.collectives import Exchange
from horovod_sparse.feedback import Bucket, recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.torch import transport
from horovod_sparse.torch.driver import Driver


@pytest.fixture(params=["auto", "alltoall"])
def way(request, monkeypatch):
    """Which transport the next choice makes."""
    transport.forget_transports(hvd.global_process_set)
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", request.param)
    yield request.param
    transport.forget_transports(hvd.global_process_set)


def ring(rank: int, size: int, length: int, rounds: int):
    """Every round to another neighbour; lengths that only the sender knows."""
    seen = []
    for number in range(rounds):
        distance = 1 + number % (size - 1)
        message = np.full(length * (rank + 1) + number, rank, np.int32)
        arrived = yield Exchange({(rank + distance) % size: message}, ((rank - distance) % size,))
        seen.append({source: (words.size, set(words.tolist())) for source, words in arrived.items()})
    return seen


def test_the_choice_is_made_once_and_known(way, rank, size):
    assert transport.chosen_transport() == "undecided"
    driver = Driver()
    driver.start("once", ring(rank, size, 1, 1))
    driver.wait()
    on_mpi = way == "auto" and hvd.mpi_enabled() and hvd.mpi_threads_supported()
    assert transport.chosen_transport() == ("mpi" if on_mpi else "alltoall")


def test_many_exchanges_in_any_order(way, rank, size):
    """Small and large messages, each rank starting in an order of its own, names used again and again."""
    driver, shuffle = Driver(), random.Random(rank)
    for _ in range(4):
        names = list(range(12))
        shuffle.shuffle(names)
        tasks = {}
        for number in names:
            length = 200_000 if number % 5 == 0 else number
            tasks[number] = driver.start(f"many{number}", ring(rank, size, length, 1 + number % 4))
            if shuffle.random() < 0.3:
                driver.advance()
        shuffle.shuffle(names)
        for number in names:
            driver.wait([tasks[number]])
            length = 200_000 if number % 5 == 0 else number
            for turn, arrived in enumerate(tasks[number].value()):
                source = (rank - 1 - turn % (size - 1)) % size
                count = length * (source + 1) + turn
                assert arrived == {source: (count, {source} if count else set())}
    assert driver.num_parked == 0


def test_nothing_is_taken_for_a_message_of_a_new_start(way, rank, size):
    """Ranks give up in different rounds; the next run of the same name is clean."""
    if way == "alltoall" or not (hvd.mpi_enabled() and hvd.mpi_threads_supported()):
        pytest.skip("Horovod keeps its own collectives apart")

    def talk(word: int, rounds: int):
        heard = []
        for _ in range(rounds):
            message = np.full(3, word, np.int32)
            heard.append((yield Exchange({(rank + 1) % size: message}, ((rank - 1) % size,))))
        return heard

    driver = Driver()
    # rank 0 never starts the second round, in which the others have sent already
    task = driver.start("given up", talk(1, 1 if rank == 0 else 2))
    while task.num_rounds < 2 and not task.done:
        driver.advance()
        time.sleep(1e-4)
    hvd.barrier()
    driver.clear()
    assert transport.chosen_transport() == "undecided"
    hvd.barrier()
    again = driver.start("given up", talk(2, 2))
    driver.wait()
    heard = [int(words[0]) for arrived in again.value() for words in arrived.values()]
    assert heard == [2, 2]


def sparsifiers(size: int) -> list[tuple[str, dict]]:
    rows: list[tuple[str, dict]] = [("gtopk", {}), ("oktopk", {}), ("topk_dsa", {})]
    for teams in range(1, size + 1):
        if size % teams == 0:
            rows += [
                ("spardl", {"teams": teams, "gather": "bruck"}),
                ("spardl", {"teams": teams, "gather": "allgather"}),
            ]
    rows.append(("spardl", {"teams": size, "between": "bruck", "values": "float16", "indices": "gaps"}))
    return rows


def test_results_are_those_of_the_simulator(way, rank, size):
    """Bit for bit, on every rank, with several buckets under way at once."""
    driver, n, num_steps = Driver(), 3000, 3
    rows = sparsifiers(size)
    generator = np.random.default_rng(size)
    gradients = generator.standard_normal((len(rows), num_steps, size, n)).astype(np.float32)
    buckets, clusters = [], []
    for number, (name, arguments) in enumerate(rows):
        made = recipe(name, density=0.02, **arguments)
        info = BucketInfo(f"bucket{number}", n, rank, size)
        buckets.append(Bucket(info, made, HostAccumulator(n, density=0.02)))
        clusters.append(SimulatedCluster(made, n, size))
    order = list(range(len(rows)))
    random.Random(rank).shuffle(order)
    for step in range(num_steps):
        tasks = {
            number: driver.start(f"row{number}", buckets[number].step(gradients[number, step, rank].copy()))
            for number in order
        }
        driver.wait()
        for number, cluster in enumerate(clusters):
            expected = cluster.synchronize([gradient.copy() for gradient in gradients[number, step]])[rank]
            sum_ = tasks[number].value()
            assert sum_.indices.tobytes() == expected.indices.tobytes(), rows[number]
            assert sum_.values.tobytes() == expected.values.tobytes(), rows[number]
            held = cluster.buckets[rank].accumulator.values()
            assert buckets[number].accumulator.values().tobytes() == held.tobytes(), rows[number]
    sums = [zlib.crc32(tasks[number].value().values.tobytes()) for number in range(len(rows))]
    everyone = hvd.allgather_object(sums)
    assert all(other == everyone[0] for other in everyone)


def test_within_a_process_set(way, rank, size, process_set):
    """Ranks count within the set, and those outside take no part."""
    ranks = sorted({0, size - 1})
    chosen = process_set(ranks)
    if rank not in ranks:
        return
    driver, inner = Driver(chosen), ranks.index(rank)
    task = driver.start("inner", ring(inner, len(ranks), 5, 3))
    driver.wait()
    other = 1 - inner
    assert task.value() == [{other: (5 * (other + 1) + turn, {other})} for turn in range(3)]
    on_mpi = way == "auto" and hvd.mpi_enabled() and hvd.mpi_threads_supported()
    assert transport.chosen_transport(chosen) == ("mpi" if on_mpi else "alltoall")
    transport.forget_transports(chosen)
