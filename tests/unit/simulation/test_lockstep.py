"""The lock-step driver: what comes back, and that a divergence is not passed over."""

from typing import Any

import numpy as np
import pytest

from horovod_sparse.carriers.exchanges import by_exchanges
from horovod_sparse.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    ReduceScatter,
    Request,
    Synchronization,
    part,
)
from horovod_sparse.errors import CollectiveMismatchError
from horovod_sparse.simulation import Recorder, run_lockstep


def words(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def asking(*requests: Request) -> Synchronization[list[Any]]:
    """A rank that asks for these, and returns what it got."""
    answers = []
    for request in requests:
        answers.append((yield request))  # noqa: PERF401 -- a comprehension cannot yield
    return answers


def test_answers_of_all_ranks() -> None:
    gathers = [asking(AllGather(words(1, 2))), asking(AllGather(words())), asking(AllGather(words(3)))]
    assert [gathered.tolist() for (gathered,) in run_lockstep(gathers)] == [[1, 2, 3]] * 3
    results = run_lockstep([asking(Broadcast(words(rank), root=1)) for rank in range(3)])
    assert [answer.tolist() for (answer,) in results] == [[1], [1], [1]]


def test_allreduce_sums() -> None:
    results = run_lockstep(
        [asking(AllReduce(np.array([1.0, 2.0]))), asking(AllReduce(np.array([10.0, 20.0])))]
    )
    assert [answer.tolist() for (answer,) in results] == [[11.0, 22.0], [11.0, 22.0]]
    results[0][0][0] = 5.0
    assert results[1][0][0] == 11.0, "each rank has its own memory"


def test_exchange_between_pairs() -> None:
    # a ring of three: rank r sends r to r + 1
    ranks = [asking(Exchange({(r + 1) % 3: words(r)}, sources=((r - 1) % 3,))) for r in range(3)]
    results = run_lockstep(ranks)
    assert [{s: b.tolist() for s, b in answer.items()} for (answer,) in results] == [
        {2: [2]},
        {0: [0]},
        {1: [1]},
    ]


def test_alltoall_transposes() -> None:
    # rank r sends r copies of 10 r + j to rank j
    ranks = [asking(AllToAll(tuple(words(*[10 * r + j] * r) for j in range(3)))) for r in range(3)]
    results = run_lockstep(ranks)
    assert [[b.tolist() for b in answer] for (answer,) in results] == [
        [[], [10], [20, 20]],
        [[], [11], [21, 21]],
        [[], [12], [22, 22]],
    ]


def test_different_kinds_in_a_round() -> None:
    ranks = [
        asking(AllGather(words(0)), AllGather(words(0))),
        asking(AllGather(words(1)), AllReduce(np.zeros(1))),
        asking(AllGather(words(2)), AllGather(words(2))),
    ]
    with pytest.raises(
        CollectiveMismatchError, match=r"round 1: .*ranks \[0, 2\]: AllGather; ranks \[1\]: AllReduce"
    ):
        run_lockstep(ranks)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (AllReduce(np.zeros(2)), AllReduce(np.zeros(3))),
        (AllReduce(np.zeros(2)), AllReduce(np.zeros(2, np.float32))),
        (Broadcast(words(1), root=0), Broadcast(words(1), root=1)),
        (Broadcast(words(1), root=0), Broadcast(words(1, 2), root=0)),
        (AllToAll((words(), words())), AllToAll((words(),))),
    ],
)
def test_the_same_kind_of_another_shape(one: Request, other: Request) -> None:
    with pytest.raises(CollectiveMismatchError, match=r"round 0: .*ranks \[0\].*ranks \[1\]"):
        run_lockstep([asking(one), asking(other)])


def test_a_rank_that_is_done_too_early() -> None:
    ranks = [asking(AllGather(words(0)), AllGather(words(0))), asking(AllGather(words(1)))]
    with pytest.raises(
        CollectiveMismatchError, match=r"round 1: ranks \[1\] are done while ranks \[0\] ask for AllGather"
    ):
        run_lockstep(ranks)


def test_a_rank_that_fails_alone_is_the_cause() -> None:
    def failing() -> Synchronization[None]:
        yield AllGather(words(1))
        raise OSError("disk full")

    with pytest.raises(CollectiveMismatchError, match=r"rank 1 raised OSError\('disk full'\)") as caught:
        run_lockstep([asking(AllGather(words(0)), AllGather(words(0))), failing()])
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("sends", "sources"),
    [
        ([{1: words(0)}, {}], [(), ()]),  # nobody awaits the message
        ([{}, {}], [(1,), ()]),  # a message that nobody sends
    ],
)
def test_an_exchange_that_does_not_pair_up(sends: Any, sources: Any) -> None:
    ranks = [asking(Exchange(send, source)) for send, source in zip(sends, sources, strict=True)]
    with pytest.raises(CollectiveMismatchError, match="awaits messages from"):
        run_lockstep(ranks)


def test_the_recorder_counts_rounds_bytes_and_time() -> None:
    recorder = Recorder()
    requests = [
        [AllGather(words(*range(rank))), AllReduce(np.zeros(8)), Broadcast(words(1, 2, 3), root=2)]
        for rank in range(4)
    ]
    run_lockstep([asking(*mine) for mine in requests], recorder)
    assert recorder.kinds == [AllGather, AllReduce, Broadcast]
    assert recorder.bytes_sent == [[0, 4, 8, 12], [64] * 4, [0, 0, 12, 0]]
    # P = 4: an allgather has 2 rounds and brings everyone else's 24 bytes less one's own; an allreduce of
    # 64 bytes has 4 rounds and brings 2 * 3/4 * 64 = 96; a broadcast 2 rounds and 12 bytes, none to the root.
    assert [(cost.rounds, cost.bytes_received) for cost in recorder.costs[0]] == [
        (2, 24),
        (2, 20),
        (2, 16),
        (2, 12),
    ]
    assert [(cost.rounds, cost.bytes_received) for cost in recorder.costs[1]] == [(4, 96.0)] * 4
    assert [(cost.rounds, cost.bytes_received) for cost in recorder.costs[2]] == [
        (2, 12),
        (2, 12),
        (2, 0),
        (2, 12),
    ]
    total = recorder.total(0)
    assert (total.rounds, total.bytes_received) == (8, 132.0)
    # each round takes as long as its slowest rank: (2 + 4 + 2) alpha + (24 + 96 + 12) beta
    network = recorder.network
    assert recorder.seconds == pytest.approx(8 * network.alpha_seconds + 132 * network.beta_seconds)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_reduce_scatter_gives_each_rank_its_part_of_the_sum(dtype: type, size: int) -> None:
    """In the simulator, and as messages between pairs: the same bits, whatever n is."""
    for num_elements in (1, 4, 7):
        given = np.random.default_rng(num_elements).standard_normal((size, num_elements)).astype(dtype)

        def whole(rank: int, given: np.ndarray = given) -> Synchronization[np.ndarray]:
            return (yield ReduceScatter(given[rank]))

        simulated = run_lockstep([whole(rank) for rank in range(size)])
        paired = run_lockstep([by_exchanges(ReduceScatter(given[r]), r, size) for r in range(size)])
        for rank, (one, other) in enumerate(zip(simulated, paired, strict=True)):
            assert one.tobytes() == other.tobytes()
            np.testing.assert_allclose(one, given.sum(0)[slice(*part(num_elements, rank, size))], rtol=1e-5)
