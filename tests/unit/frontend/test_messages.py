"""Messages over ZeroMQ: what is delivered, and what happens where somebody cannot be reached, or is gone."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from horovod_sparse.collectives import AllGather, Exchange, ReduceScatter
from horovod_sparse.errors import CollectiveMismatchError, UnknownNameError
from horovod_sparse.frontend import messages
from horovod_sparse.frontend.messages import carrier_for, transport_asked, zeromq
from horovod_sparse.frontend.messages.zeromq import ZmqPairs
from horovod_sparse.frontend.transport import Rounds

zmq = pytest.importorskip("zmq")

from support.zmq_ranks import everyone_says, words  # noqa: E402


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
    assert carrier_for(Gloo(), 2) == (None, reason)


def test_zeromq_is_missing(monkeypatch):
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", "pairs")
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    carrier, reason = carrier_for(Gloo(), 2)
    assert carrier is None and reason.startswith("pyzmq cannot be imported")


def test_a_way_that_there_is_not(monkeypatch):
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", "mpi")
    with pytest.raises(UnknownNameError, match="alltoall"):
        transport_asked()


def test_who_cannot_listen_does_without_and_leaves_nothing_open(monkeypatch):
    """An open socket would hold the process at its end."""
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", "pairs")
    monkeypatch.setattr(zeromq, "_own_address", lambda: "203.0.113.1")  # which no host has
    made, context = [], zmq.Context

    def noted() -> Any:
        made.append(context())
        return made[-1]

    monkeypatch.setattr(zmq, "Context", noted)
    carrier, reason = carrier_for(Gloo(), 2)
    assert carrier is None and reason.startswith("ZeroMQ cannot listen: ZMQ")
    assert made and all(one.closed for one in made)


def test_fewer_files_than_connections(monkeypatch):
    """ZeroMQ itself would end the process."""
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", "pairs")
    monkeypatch.setattr(zeromq.resource, "getrlimit", lambda _: (1024, 4096))
    carrier, reason = carrier_for(Gloo(), 300)
    assert carrier is None
    assert reason == "ZeroMQ needs up to 1200 open files for 300 ranks, and ulimit -n says 1024"
    carrier, _ = carrier_for(Gloo(), 2)
    assert carrier is not None
    carrier.forget()


def test_a_message_for_all_is_copied_once(connected, monkeypatch):
    ranks, sent, send = connected(3), [], ZmqPairs._send
    monkeypatch.setattr(
        ZmqPairs, "_send", lambda self, peer, head, what: (sent.append(what), send(self, peer, head, what))[1]
    )
    begin = [partial(one.start, rank=rank) for rank, one in enumerate(ranks)]
    rounds = [
        Rounds(begin[rank], AllGather(np.full(1000, rank, np.int32)), "x", rank, 3) for rank in range(3)
    ]
    for one in rounds:
        assert one.result().tolist() == np.repeat(np.arange(3), 1000).tolist()
    assert len(sent) == 6 and len(set(map(id, sent))) == 3
    assert all(isinstance(one, zmq.Frame) for one in sent)


def test_lengths_that_differ_are_an_error_of_result_alone(connected):
    """NumPy would add one element to each of two; and hooks of a backward pass ask `done`."""
    ranks, lengths = connected(2), (2, 4)
    rounds = [
        Rounds(partial(one.start, rank=rank), ReduceScatter(np.ones(lengths[rank])), "x", rank, 2)
        for rank, one in enumerate(ranks)
    ]
    for one, sizes in zip(rounds, ((16, 8), (8, 16)), strict=True):
        until = time.monotonic() + 5.0
        while not one.done() and time.monotonic() < until:
            time.sleep(0.001)
        assert one.done() and one.is_known()
        with pytest.raises(CollectiveMismatchError, match=rf"sent {sizes[0]} bytes .* has {sizes[1]}"):
            one.result()


def test_what_fails_below_is_an_error_of_result_alone(connected, monkeypatch):
    ranks = connected(2)
    handle = ranks[0].start(Exchange({}, (1,)), "x", 0)

    def fail() -> None:
        raise zmq.ZMQError(zmq.EFSM)

    monkeypatch.setattr(ranks[0], "progress", fail)
    assert handle.done()
    with pytest.raises(zmq.ZMQError):
        handle.result()


@pytest.mark.parametrize(
    ("asked", "rank", "beside", "failed", "warns"),
    [
        ("pairs", 0, False, False, True),
        ("pairs", 1, False, False, False),
        ("pairs", 0, True, False, False),
        ("auto", 0, False, False, False),
        ("auto", 0, False, True, True),
    ],
)
def test_what_was_asked_in_vain_is_warned_of_once(monkeypatch, caplog, asked, rank, beside, failed, warns):
    monkeypatch.setenv("HOROVOD_SPARSE_TRANSPORT", asked)
    monkeypatch.setattr(messages, "_warned", set())
    with caplog.at_level(logging.INFO, logger="horovod_sparse"):
        for _ in range(2):
            messages.log_transport("Horovod's all-to-all (no pyzmq)", rank, beside=beside, failed=failed)
    assert [record.levelname for record in caplog.records] == ["WARNING" if warns else "INFO", "INFO"]
    assert all("Horovod's all-to-all (no pyzmq)" in record.getMessage() for record in caplog.records)
