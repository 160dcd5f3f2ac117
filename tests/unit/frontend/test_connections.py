"""Connections of ZeroMQ: how they are made, and what is done where a rank cannot be reached, or is gone."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from horovod_sparse.collectives import Exchange
from horovod_sparse.frontend.messages import zeromq
from horovod_sparse.frontend.messages.zeromq import ZmqPairs

zmq = pytest.importorskip("zmq")

from support.zmq_ranks import everyone_says, listening, offers, words  # noqa: E402


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


def free_address() -> str:
    """At which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_a_rank_that_listens_late_is_reached():
    """Although a connection that has ended is not taken up again."""
    (one,) = listening(1)
    address = free_address()
    there = [*offers([one]), {"address": address, "token": secrets.token_bytes(16).hex()}]
    context = zmq.Context()
    late = context.socket(zmq.DEALER)
    bind = threading.Timer(0.5, lambda: late.bind(address))
    bind.start()
    one.connect(there)
    bind.join()
    one.start(Exchange({1: words(5)}, ()), "x", 0)
    assert late.poll(5000) and bytes(late.recv_multipart()[1]) == words(5).tobytes()
    one.forget()
    context.destroy(linger=0)


def test_no_connection_is_taken_up_again(connected):
    """Messages may be lost on it, and nobody would know."""
    ranks = connected(2)
    address = ranks[1].address
    ranks[1].forget()
    context = zmq.Context()
    another = context.socket(zmq.DEALER)
    another.bind(address)
    for _ in range(10):
        ranks[0].start(Exchange({1: words(5)}, ()), "x", 0)
        assert not another.poll(100)
    context.destroy(linger=0)


def test_what_is_given_up_while_it_connects_is_closed_by_its_own_thread(monkeypatch):
    """ZeroMQ's sockets are of one thread at a time."""
    (one,), closed, failed = listening(1), [], []
    shut = one._shut
    monkeypatch.setattr(one, "_shut", lambda linger: (closed.append(threading.get_ident()), shut(linger)))
    there = [*offers([one]), {"address": free_address(), "token": secrets.token_bytes(16).hex()}]

    def connect() -> None:
        try:
            one.connect(there)
        except ConnectionError as error:
            failed.append(str(error))

    thread = threading.Thread(target=connect)
    thread.start()
    time.sleep(0.3)
    one.forget()
    thread.join(2.0)
    assert not thread.is_alive() and failed == ["it was given up meanwhile"]
    assert closed == [thread.ident] and not one.is_known()


def test_connecting_takes_no_longer_than_half_the_deadline(monkeypatch):
    monkeypatch.setenv("HOROVOD_SPARSE_DEADLINE_SECONDS", "1")
    (one,), begun = listening(1), time.monotonic()
    with pytest.raises(ConnectionError, match="cannot be reached"):
        one.connect([*offers([one]), {"address": free_address(), "token": secrets.token_bytes(16).hex()}])
    assert 0.5 <= time.monotonic() - begun < 5.0
    one.forget()


@contextlib.contextmanager
def another_process() -> Iterator[tuple[ZmqPairs, int, int]]:
    """Rank 0 here; rank 1 in a process of its own, which says by a pipe what it got of rank 0."""
    (here,) = listening(1)
    (to_read, told), (given, to_write) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            (there,) = listening(1)
            os.write(told, json.dumps(offers([there])[0]).encode())
            there.connect(json.loads(os.read(given, 10_000)))
            os.write(told, b"ready")
            try:
                found = there.start(Exchange({}, (0,)), "x", 1).result()[0]
                os.write(told, f"{found.size}".encode())
            except BaseException as error:
                os.write(told, f"{error}".encode())
        os._exit(0)
    try:
        everyone = [*offers([here]), json.loads(os.read(to_read, 10_000))]
        os.write(to_write, json.dumps(everyone).encode())
        here.connect(everyone)
        assert os.read(to_read, 100) == b"ready"
        yield here, child, to_read
    finally:
        here.forget()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for one in (to_read, told, given, to_write):
            os.close(one)


def test_a_rank_that_says_nothing_is_gone_after_a_while(monkeypatch):
    """Its connections are there still: as with a host without power, or where a dead rank has forked."""
    exceptions = pytest.importorskip("horovod.common.exceptions")
    monkeypatch.setattr(zeromq, "_BEAT_MS", 100)
    monkeypatch.setattr(zeromq, "_BEAT_ANSWER_MS", 1000)
    with another_process() as (here, child, _):
        waiting = here.start(Exchange({}, (1,)), "x", 0)
        time.sleep(2.5)
        assert not waiting.done(), "a rank that only computes is there"
        os.kill(child, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(exceptions.HorovodInternalError, match="rank 1 has ended"):
            waiting.result()
        assert time.monotonic() - begun < 10.0


def test_a_rank_that_ends_listens_until_what_it_sent_has_left():
    """Others take the end of its listening for its end, and a message that has not come by then for lost."""
    length = 30_000_000
    with another_process() as (here, child, to_read):
        os.kill(child, signal.SIGSTOP)
        here.start(Exchange({1: np.zeros(length, np.int32)}, ()), "x", 0)
        closing = threading.Thread(target=here.close)
        closing.start()
        time.sleep(1.0)
        assert closing.is_alive() and not here._listening.closed
        os.kill(child, signal.SIGCONT)
        assert os.read(to_read, 1000) == f"{length}".encode()
        closing.join(10.0)
        assert not closing.is_alive() and here._listening.closed


def test_an_end_waits_for_no_rank_that_is_gone(connected):
    ranks = connected(2)
    ranks[1].forget()
    time.sleep(0.3)
    ranks[0].start(Exchange({1: np.zeros(1_000_000, np.int32)}, ()), "x", 0)
    begun = time.monotonic()
    ranks[0].close()
    assert time.monotonic() - begun < 5.0
