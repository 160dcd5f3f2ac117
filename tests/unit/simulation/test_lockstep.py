"""The lock-step driver: what comes back, and that a divergence is not passed over."""

from typing import Any

import numpy as np
import pytest

from horovod_sparse.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Request,
    Synchronization,
)
from horovod_sparse.errors import CollectiveMismatchError
from horovod_sparse.simulation import run_lockstep


def words(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def asking(*requests: Request) -> Synchronization[list[Any]]:
    answers = []
    for request in requests:
        answers.append((yield request))  # noqa: PERF401 -- a comprehension cannot yield
    return answers


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
def test_ranks_that_request_other_collectives_are_named(
    ranks: list[tuple[Request, ...]], complaint: str
) -> None:
    with pytest.raises(CollectiveMismatchError, match=complaint):
        run_lockstep([asking(*requests) for requests in ranks])


def test_a_rank_that_fails_alone_is_the_cause() -> None:
    def failing() -> Synchronization[None]:
        yield AllGather(words(1))
        raise OSError("disk full")

    with pytest.raises(CollectiveMismatchError, match=r"rank 1 raised OSError\('disk full'\)") as caught:
        run_lockstep([asking(AllGather(words(0)), AllGather(words(0))), failing()])
    assert isinstance(caught.value.__cause__, OSError)
