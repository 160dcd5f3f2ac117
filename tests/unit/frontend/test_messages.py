"""Messages over ZeroMQ: what is delivered, and what happens where somebody cannot be reached, or is gone."""

from __future__ import annotations

import os
import secrets
import time

import numpy as np
import pytest

from horovod_sparse.collectives import Exchange
from horovod_sparse.errors import CollectiveMismatchError, UnknownNameError
from horovod_sparse.frontend.messages import carrier_for, transport_asked, zeromq
from horovod_sparse.frontend.messages.zeromq import ZmqPairs

zmq = pytest.importorskip("zmq")


@pytest.fixture
def connected():
    """Makes ranks that are connected, in this process."""
    made = []

    def make(size: int) -> list[ZmqPairs]:
        ranks = listening(size)
        made.extend(ranks)
        for one in ranks:
            one.connect(offers(ranks))
        return ranks

    yield make
    for one in made:
        one.forget()


def listening(size: int) -> list[ZmqPairs]:
    return [ZmqPairs(zmq, secrets.token_bytes(16)) for _ in range(size)]


def offers(ranks: list[ZmqPairs]) -> list[dict[str, str]]:
    return [{"address": one.address, "token": one._token.hex()} for one in ranks]


def words(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def everyone_says(ranks, name, message):
    """An exchange of all with all, under way."""
    others = [tuple(peer for peer in range(len(ranks)) if peer != rank) for rank in range(len(ranks))]
    return [
        one.start(Exchange(dict.fromkeys(others[rank], message(rank)), others[rank]), name, rank)
        for rank, one in enumerate(ranks)
    ]


def test_all_with_all_in_any_order(connected):
    """Empty messages, large ones, of odd lengths; exchanges are taken in another order than they began in."""
    ranks = connected(3)
    sizes = [0, 1, 7, 300_001]
    begun = [
        everyone_says(ranks, f"x{size}", lambda rank, n=size: np.full(n, rank, np.int32)) for size in sizes
    ]
    for size, handles in reversed(list(zip(sizes, begun, strict=True))):
        for rank, handle in enumerate(handles):
            answer = handle.result()
            assert sorted(answer) == [peer for peer in range(3) if peer != rank]
            for peer, message in answer.items():
                assert message.dtype == np.int32 and message.flags.aligned and message.flags.writeable
                assert message.size == size and (message == peer).all()


def test_what_was_sent_may_change_at_once(connected):
    ranks = connected(2)
    buffer = np.full(100_000, 5, np.int32)
    ranks[0].start(Exchange({1: buffer}, ()), "x", 0)
    buffer[:] = 6
    assert set(ranks[1].start(Exchange({}, (0,)), "x", 1).result()[0].tolist()) == {5}


def test_an_unawaited_message_is_an_error(connected):
    ranks = connected(2)
    ranks[0].start(Exchange({1: words(1)}, ()), "x", 0)
    deaf = ranks[1].start(Exchange({}, ()), "x", 1)
    time.sleep(0.2)
    with pytest.raises(CollectiveMismatchError, match="sent to it too"):
        deaf.result()


def test_strangers_are_not_heard(connected):
    """Whoever does not know a rank's token."""
    ranks = connected(2)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(ranks[1].address)
    for parts in ([b"x"], [b"x", b"y", b"z"], [b"0" * 32, b"1234"], [b"0" * 32, b"odd"]):
        socket.send_multipart(parts)
    time.sleep(0.2)
    handles = everyone_says(ranks, "x", lambda rank: words(rank))
    assert [handle.result()[1 - rank].tolist() for rank, handle in enumerate(handles)] == [[1], [0]]
    assert ranks[1]._inbox == {}
    socket.close(linger=0)


def test_a_rank_that_is_gone_is_an_error_soon(connected):
    """Not before what it had sent has come, and only where a message of it is awaited."""
    exceptions = pytest.importorskip("horovod.common.exceptions")
    ranks = connected(3)
    ranks[2].start(Exchange({0: words(7)}, ()), "sent before", 2)
    ranks[2].close()
    begun = time.monotonic()
    waiting = ranks[1].start(Exchange({}, (2,)), "never sent", 1)
    with pytest.raises(exceptions.HorovodInternalError, match="rank 2 has ended"):
        waiting.result()
    assert 1.0 <= time.monotonic() - begun < 5.0
    assert ranks[0].start(Exchange({}, (2,)), "sent before", 0).result()[2].tolist() == [7]
    ranks[0].start(Exchange({1: words(8)}, ()), "goes on", 0)
    assert ranks[1].start(Exchange({}, (0,)), "goes on", 1).result()[0].tolist() == [8]


def test_a_rank_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr(zeromq, "_CONNECT_SECONDS", 0.5)
    ranks = listening(2)
    there = offers(ranks)
    ranks[1].forget()
    with pytest.raises(ConnectionError, match=rf"ranks \[1\] cannot be reached, .* at {there[1]['address']}"):
        ranks[0].connect(there)
    ranks[0].forget()


def test_a_fork_leaves_the_sockets_alone(connected):
    """As workers that load data do, which end while the training goes on."""
    ranks = connected(2)
    child = os.fork()
    if child == 0:
        zeromq._close_all()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    handles = everyone_says(ranks, "x", lambda rank: words(rank))
    assert [handle.result()[1 - rank].tolist() for rank, handle in enumerate(handles)] == [[1], [0]]


class Gloo:
    """As much of Horovod's binding as is asked."""

    def mpi_enabled(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("asked", "reason"),
    [("auto", "Horovod does not run on MPI"), ("alltoall", "HOROVOD_SPARSE_TRANSPORT says so")],
)
def test_nothing_is_used_beside_gloo_unasked(monkeypatch, asked, reason):
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", asked)
    assert carrier_for(Gloo()) == (None, reason)


def test_zeromq_is_missing(monkeypatch):
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", "pairs")
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    carrier, reason = carrier_for(Gloo())
    assert carrier is None and reason.startswith("pyzmq cannot be imported")


def test_a_way_that_there_is_not(monkeypatch):
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", "mpi")
    with pytest.raises(UnknownNameError, match="alltoall"):
        transport_asked()
