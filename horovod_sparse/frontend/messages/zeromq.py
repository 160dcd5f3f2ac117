"""Messages between two ranks over ZeroMQ, where Horovod runs on Gloo.

A library's thread sends and receives, beside Python and beside Horovod; a rank has one socket that all others
send to, and one that sends to all. Each process makes both before ranks agree to use them, and tells where it
listens.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.frontend.messages.pairs import HEADER, Pairs, Words

#: how long ranks have to reach each other
_CONNECT_SECONDS = 30.0
#: between two looks at which connections have ended
_LOOK_SECONDS = 0.05
#: what a rank had sent before it ended may come later than the news of that
_GRACE_SECONDS = 1.0
#: how long the end of a process waits for what it has sent: with a rank that is gone, and else
_LINGER_GONE_MS, _LINGER_MS = 1000, 30_000
_TOKEN_BYTES = 16

#: all that are open, in the process that made them
_open: list[ZmqPairs] = []


class ZmqPairs(Pairs):
    """Messages over ZeroMQ.

    A connection that has ended is not taken up again: what was under way on it may be lost, so whoever awaits
    a message from there gets an error. (Time in which a process is stopped ends no connection.)

    Args:
        zmq: the module.
        token: that others put in front of what they send here.
    """

    def __init__(self, zmq: Any, token: bytes) -> None:
        super().__init__()
        self._zmq, self._token, self._maker = zmq, token, os.getpid()
        context = _context(zmq)
        # many send to the first, and the second chooses by number who gets what it sends
        self._listening, self._sending = context.socket(zmq.DEALER), context.socket(zmq.ROUTER)
        for one in (self._listening, self._sending):
            one.set_hwm(0)  # a rank that is late must not stop those that send to it
            one.setsockopt(zmq.LINGER, _LINGER_MS)
            one.setsockopt(zmq.IPV6, 1)
            # a host that is gone without a word ends its connections
            one.setsockopt(zmq.TCP_KEEPALIVE, 1)
            one.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
            one.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
            one.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        self._listening.setsockopt(zmq.BACKLOG, 4096)
        self._sending.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._monitor = self._sending.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        host = _own_address()
        host = f"[{host}]" if ":" in host else host
        self.address = f"tcp://{host}:{self._listening.bind_to_random_port(f'tcp://{host}')}"
        #: of this rank, and by number what goes in front of what is sent there
        self._rank, self._tokens = -1, dict[int, bytes]()
        self._peers: dict[str, int] = {}
        self._connected: set[int] = set()
        #: since when, in seconds of `time.monotonic`
        self._gone: dict[int, float] = {}
        self._looked = -1.0
        self._closed = False
        _open.append(self)

    def connect(self, offers: Sequence[Mapping[str, Any]]) -> None:
        """Connects to all others, and waits until they are reached.

        Args:
            offers: address and token of all ranks, in their order.

        Raises:
            ConnectionError: if some are not, in time.
        """
        for peer, offer in enumerate(offers):
            token = bytes.fromhex(offer["token"])
            if token == self._token:
                self._rank = peer
                continue
            self._tokens[peer], self._peers[offer["address"]] = token, peer
            self._sending.setsockopt(self._zmq.CONNECT_ROUTING_ID, _place(peer))
            self._sending.connect(offer["address"])
        begun = time.monotonic()
        while missing := sorted(self._tokens.keys() - self._connected):
            if time.monotonic() > begun + _CONNECT_SECONDS:
                where = next(address for address, peer in self._peers.items() if peer == missing[0])
                raise ConnectionError(f"ranks {missing} cannot be reached, the first of them at {where}")
            self._monitor.poll(100)
            self._look()

    def _look(self) -> None:
        """Which connections have been made, and which have ended."""
        monitor = importlib.import_module("zmq.utils.monitor")
        with contextlib.suppress(self._zmq.Again):
            while True:
                event = monitor.recv_monitor_message(self._monitor, self._zmq.NOBLOCK)
                peer = self._peers.get(event["endpoint"].decode(), -1)
                if event["event"] == self._zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connected.add(peer)
                elif peer in self._connected:
                    self._gone.setdefault(peer, time.monotonic())

    def _send(self, peer: int, header: Words, words: Words) -> Sequence[Any]:
        header[3] = self._rank
        with contextlib.suppress(self._zmq.ZMQError):  # who is gone gets nothing; waiting for it is an error
            self._sending.send_multipart(
                [_place(peer), self._tokens[peer] + header.tobytes(), words], copy=True
            )
        return ()

    def progress(self) -> None:
        """Takes in whatever has arrived, without waiting."""
        if self._closed:
            return
        with contextlib.suppress(self._zmq.Again):
            while True:
                self._take_in(self._listening.recv_multipart(self._zmq.NOBLOCK, copy=False))

    def _take_in(self, frames: Sequence[Any]) -> None:
        head = bytes(frames[0])
        if len(frames) != 2 or len(head) != _TOKEN_BYTES + 4 * HEADER or head[:_TOKEN_BYTES] != self._token:
            return  # from somebody else
        header = np.frombuffer(head, np.int32, offset=_TOKEN_BYTES)
        body = frames[1].buffer
        # what ZeroMQ received need not lie where int32 may
        words = np.empty(body.nbytes // 4, np.int32)
        words.view(np.uint8)[:] = np.frombuffer(body, np.uint8)
        self._inbox[self._key_in(header)][int(header[3])] = words

    def is_known(self) -> bool:
        """Whether its sockets are open."""
        return not self._closed

    def lost(self, sources: set[int]) -> Exception | None:
        """What Horovod raises where a rank is lost, if one of these is."""
        now = time.monotonic()
        if now > self._looked + _LOOK_SECONDS:
            self._looked = now
            self._look()
        gone = [peer for peer in sorted(sources) if now > self._gone.get(peer, now) + _GRACE_SECONDS]
        if not gone:
            return None
        failure: type[Exception] = importlib.import_module("horovod.common.exceptions").HorovodInternalError
        return failure(f"the connection to rank {gone[0]} has ended, and its message has not come")

    def close(self) -> None:
        """Closes its sockets; what was sent still leaves."""
        self._close(_LINGER_GONE_MS if self._gone else _LINGER_MS)

    def forget(self) -> None:
        """Closes its sockets, whatever is under way."""
        self._close(0)

    def _close(self, linger_ms: int) -> None:
        if self._closed:
            return
        self._closed = True
        if self in _open:
            _open.remove(self)
        if os.getpid() != self._maker:
            return  # a copy in a process that was forked; its threads are elsewhere
        self._sending.disable_monitor()
        for one in (self._monitor, self._listening, self._sending):
            one.close(linger=linger_ms)  # the context ends only when all are closed


def _place(peer: int) -> bytes:
    """A rank, as a socket is told whom to send to; the first byte may not be 0."""
    return b"r" + peer.to_bytes(4, "little")


_contexts: dict[int, Any] = {}


def _context(zmq: Any) -> Any:
    """The process's own, with the thread that sends and receives."""
    process = os.getpid()
    if process not in _contexts:
        _contexts[process] = zmq.Context()
    return _contexts[process]


@atexit.register
def _close_all() -> None:
    for pairs in [*_open]:
        pairs.close()
    context = _contexts.pop(os.getpid(), None)
    if context is not None:
        context.term()  # returns when all that was sent has left, or its time is over


def _own_address() -> str:
    """Where others reach this host: at Horovod's interface, or from where its store is reached."""
    interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    if interface:
        with contextlib.suppress(ImportError):
            psutil = importlib.import_module("psutil")
            for one in psutil.net_if_addrs().get(interface, ()):
                if one.family == socket.AF_INET:
                    return str(one.address)
    store = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    family, kind, protocol, _, address = socket.getaddrinfo(store, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


class ZmqCarrier:
    """Makes `ZmqPairs`; see `horovod_sparse.frontend.messages.Carrier`."""

    name = "zmq"
    words = "ZeroMQ (every rank can)"

    def __init__(self, zmq: Any) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._pairs = ZmqPairs(zmq, self._token)

    def offer(self) -> dict[str, Any]:
        """Where this rank listens."""
        return {"address": self._pairs.address, "token": self._token.hex()}

    def connect(self, offers: Sequence[Mapping[str, Any]], ranks: Sequence[int], number: int) -> ZmqPairs:
        """Connected to all others."""
        self._pairs.connect(offers)
        return self._pairs

    def forget(self) -> None:
        """Closes the sockets, whatever is under way."""
        self._pairs.forget()


def zmq_carrier() -> tuple[ZmqCarrier | None, str]:
    """ZeroMQ, if this rank has it.

    Returns:
        It, or None and why it cannot be used.
    """
    try:
        zmq = importlib.import_module("zmq")
    except ImportError as error:
        return None, f"pyzmq cannot be imported: {error}"
    try:
        return ZmqCarrier(zmq), ""
    except OSError as error:
        return None, f"ZeroMQ cannot listen: {error}"
