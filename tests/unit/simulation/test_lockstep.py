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
from horovod_sparse.simulation import AlphaBeta, Recorder, run_lockstep


def words(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def asking(*requests: Request) -> Synchronization[list[Any]]:
    answers = []
    for request in requests:
        answers.append((yield request))  # noqa: PERF401 -- a comprehension cannot yield
    return answers


def plain(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {source: message.tolist() for source, message in answer.items()}
    return [message.tolist() for message in answer] if isinstance(answer, list) else answer.tolist()


@pytest.mark.parametrize(
    ("requests", "answers"),
    [
        ([AllGather(words(1, 2)), AllGather(words()), AllGather(words(3))], [[1, 2, 3]] * 3),
        ([Broadcast(words(rank), root=1) for rank in range(3)], [[1], [1], [1]]),
        ([AllReduce(np.array([1.0, 2.0])), AllReduce(np.array([10.0, 20.0]))], [[11.0, 22.0]] * 2),
        # a ring of three: rank r sends r to r + 1
        (
            [Exchange({(r + 1) % 3: words(r)}, ((r - 1) % 3,)) for r in range(3)],
            [{2: [2]}, {0: [0]}, {1: [1]}],
        ),
        # rank r sends r copies of 10 r + j to rank j
        (
            [AllToAll(tuple(words(*[10 * r + j] * r) for j in range(3))) for r in range(3)],
            [[[], [10 + j], [20 + j, 20 + j]] for j in range(3)],
        ),
    ],
)
def test_answers_of_all_ranks(requests: list[Request], answers: list[Any]) -> None:
    results = run_lockstep([asking(request) for request in requests])
    assert [plain(answer) for (answer,) in results] == answers
    if isinstance(requests[0], AllReduce):
        results[0][0][0] = 5.0
        assert results[1][0][0] == 11.0, "each rank has its own memory"


GATHER = AllGather(words(0))


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        (
            [(GATHER, GATHER), (GATHER, AllReduce(np.zeros(1))), (GATHER, GATHER)],
            r"round 1: .*ranks \[0, 2\]: AllGather; ranks \[1\]: AllReduce",
        ),
        ([(GATHER, GATHER), (GATHER,)], r"round 1: ranks \[1\] are done while ranks \[0\] ask for AllGather"),
        *(
            ([(one,), (other,)], r"round 0: .*ranks \[0\].*ranks \[1\]")
            for one, other in (
                (AllReduce(np.zeros(2)), AllReduce(np.zeros(3))),
                (AllReduce(np.zeros(2)), AllReduce(np.zeros(2, np.float32))),
                (Broadcast(words(1), root=0), Broadcast(words(1), root=1)),
                (Broadcast(words(1), root=0), Broadcast(words(1, 2), root=0)),
                (AllToAll((words(), words())), AllToAll((words(),))),
            )
        ),
        # nobody awaits the message; a message that nobody sends
        ([(Exchange({1: words(0)}, ()),), (Exchange({}, ()),)], "awaits messages from"),
        ([(Exchange({}, (1,)),), (Exchange({}, ()),)], "awaits messages from"),
    ],
)
def test_ranks_that_do_not_ask_alike(ranks: list[tuple[Request, ...]], complaint: str) -> None:
    with pytest.raises(CollectiveMismatchError, match=complaint):
        run_lockstep([asking(*requests) for requests in ranks])


def test_a_rank_that_fails_alone_is_the_cause() -> None:
    def failing() -> Synchronization[None]:
        yield AllGather(words(1))
        raise OSError("disk full")

    with pytest.raises(CollectiveMismatchError, match=r"rank 1 raised OSError\('disk full'\)") as caught:
        run_lockstep([asking(AllGather(words(0)), AllGather(words(0))), failing()])
    assert isinstance(caught.value.__cause__, OSError)


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
    assert [[(cost.rounds, cost.bytes_received) for cost in costs] for costs in recorder.costs] == [
        [(2, 24), (2, 20), (2, 16), (2, 12)],
        [(4, 96.0)] * 4,
        [(2, 12), (2, 12), (2, 0), (2, 12)],
    ]
    total = recorder.total(0)
    assert (total.rounds, total.bytes_received) == (8, 132.0)
    assert AlphaBeta(1e-4, 1e-8).seconds(total) == pytest.approx(8e-4 + 132e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_reduce_scatter_gives_each_rank_its_part_of_the_sum(dtype: type, size: int) -> None:
    for num_elements in (1, 4, 7):
        given = np.random.default_rng(num_elements).standard_normal((size, num_elements)).astype(dtype)

        def whole(rank: int, given: np.ndarray = given) -> Synchronization[np.ndarray]:
            return (yield ReduceScatter(given[rank]))

        simulated = run_lockstep([whole(rank) for rank in range(size)])
        paired = run_lockstep([by_exchanges(ReduceScatter(given[r]), r, size) for r in range(size)])
        for rank, (one, other) in enumerate(zip(simulated, paired, strict=True)):
            assert one.tobytes() == other.tobytes()
            np.testing.assert_allclose(one, given.sum(0)[slice(*part(num_elements, rank, size))], rtol=1e-5)
