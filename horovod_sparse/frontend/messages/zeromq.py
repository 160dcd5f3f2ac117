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
import resource
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.frontend.deadline import deadline_of
from horovod_sparse.frontend.messages.pairs import HEADER, Pairs, Words

#: how long ranks have to reach each other, and between two attempts
_CONNECT_SECONDS, _RETRY_SECONDS = 30.0, 0.1
#: between two looks at which connections have ended
_LOOK_SECONDS = 0.05
#: what a rank had sent before it ended may come later than the news of that
_GRACE_SECONDS = 1.0
#: how often the other end is asked whether it is there, and how long it has to answer
_BEAT_MS, _BEAT_ANSWER_MS = 10_000, 120_000
#: how long the end of a process waits for what it has sent: with a rank that is gone, and else
_LINGER_GONE_MS, _LINGER_MS = 1000, 30_000
#: within which a thread that connects ends when it is told to
_STOP_SECONDS = 1.0
#: open files of a process for each rank: two connections, and room for what else there is
_FILES_PER_RANK = 4
_TOKEN_BYTES = 16

#: all that are open, in the process that made them
_open: list[ZmqPairs] = []


class ZmqPairs(Pairs):
    """Messages over ZeroMQ.

    A connection that has ended is not taken up again: what was under way on it may be lost, so whoever awaits
    a message from there gets an error. It ends with the process at its other end; and where that says nothing
    for two minutes, though ZeroMQ's own thread answers there: a host that is gone without a word, a process
    that is dead while others that it forked keep its connections. The price is that a rank which is stopped
    for longer is lost. Shorter stops end no connection.

    Making and closing it are for one thread, but for `forget` while another one is in `connect`.

    Args:
        zmq: the module.
        token: that others put in front of what they send here.
    """

    def __init__(self, zmq: Any, token: bytes) -> None:
        super().__init__()
        self._zmq, self._token, self._maker = zmq, token, os.getpid()
        #: of this rank, and by number what goes in front of what is sent there
        self._rank, self._tokens = -1, dict[int, bytes]()
        #: by address; by number what the sending socket calls it, and how often it was tried
        self._peers: dict[str, int] = {}
        self._places: dict[int, bytes] = {}
        self._num_tried: dict[int, int] = {}
        self._connected: set[int] = set()
        #: since when, in seconds of `time.monotonic`
        self._gone: dict[int, float] = {}
        self._failed: set[int] = set()
        self._looked = -1.0
        self._lock, self._shut_down = threading.Lock(), threading.Event()
        self._connecting = self._closed = False
        #: contexts in the order in which they end, each with its sockets: what was sent is to leave before
        #: this rank stops to listen, since the others take that for its end
        self._parts: list[tuple[Any, list[Any]]] = []
        try:
            self._make()
        except BaseException:
            self._shut(0)  # a context with an open socket would hold the process at its end
            raise
        _open.append(self)

    def _make(self) -> None:
        # many send to the second, and the first chooses by number who gets what it sends
        self._sending, self._listening = self._socket(self._zmq.ROUTER), self._socket(self._zmq.DEALER)
        self._listening.setsockopt(self._zmq.BACKLOG, 4096)
        self._sending.setsockopt(self._zmq.ROUTER_MANDATORY, 1)
        # a connection taken up again would hide that messages are lost; `connect` tries again itself
        self._sending.setsockopt(self._zmq.RECONNECT_IVL, -1)
        events = ("HANDSHAKE_SUCCEEDED", "DISCONNECTED", "CLOSED")
        self._monitor = self._sending.get_monitor_socket(
            sum(int(getattr(self._zmq, f"EVENT_{event}")) for event in events)
        )
        self._parts[0][1].append(self._monitor)
        host = _own_address()
        host = f"[{host}]" if ":" in host else host
        self.address = f"tcp://{host}:{self._listening.bind_to_random_port(f'tcp://{host}')}"

    def _socket(self, kind: int) -> Any:
        """In a context of its own, whose end can be waited for."""
        context, sockets = self._zmq.Context(), list[Any]()
        self._parts.append((context, sockets))
        sockets.append(made := context.socket(kind))
        made.set_hwm(0)  # a rank that is late must not stop those that send to it
        made.setsockopt(self._zmq.LINGER, 0)  # nothing waits for a rank that is gone; the end asks for more
        made.setsockopt(self._zmq.IPV6, 1)
        made.setsockopt(self._zmq.HEARTBEAT_IVL, _BEAT_MS)
        made.setsockopt(self._zmq.HEARTBEAT_TIMEOUT, _BEAT_ANSWER_MS)
        return made

    def connect(self, offers: Sequence[Mapping[str, Any]]) -> None:
        """Connects to all others, and waits until they are reached.

        Args:
            offers: address and token of all ranks, in their order.

        Raises:
            ConnectionError: if some are not, in time, or it was closed meanwhile.
        """
        with self._lock:
            self._connecting = not self._closed
        try:
            self._reach(offers)
        finally:
            with self._lock:
                mine = self._connecting and self._closed
                self._connecting = False
            if mine:  # no other thread may, as long as this one uses the sockets
                self._shut(0)

    def _reach(self, offers: Sequence[Mapping[str, Any]]) -> None:
        seconds = min(_CONNECT_SECONDS, deadline_of() / 2)
        for peer, offer in enumerate(offers):
            token = bytes.fromhex(offer["token"])
            if token == self._token:
                self._rank = peer
                continue
            self._tokens[peer], self._peers[offer["address"]] = token, peer
        addresses, begun = {peer: address for address, peer in self._peers.items()}, time.monotonic()
        untried = set(addresses)
        while missing := sorted(addresses.keys() - self._connected):
            if self._closed:
                raise ConnectionError("it was given up meanwhile")
            if time.monotonic() > begun + seconds:
                where = addresses[missing[0]]
                raise ConnectionError(f"ranks {missing} cannot be reached, the first of them at {where}")
            for peer in sorted(untried):
                self._try(peer, addresses[peer])
            self._monitor.poll(round(1000 * _RETRY_SECONDS))
            self._look()
            untried, self._failed = self._failed - self._connected, set()
            for peer in untried:
                with contextlib.suppress(self._zmq.ZMQError):  # ZeroMQ may have done so itself
                    self._sending.disconnect(addresses[peer])
            if untried:
                time.sleep(_RETRY_SECONDS)

    def _try(self, peer: int, address: str) -> None:
        # under another name each time: ZeroMQ ends the process where one is taken still
        number = self._num_tried[peer] = self._num_tried.get(peer, -1) + 1
        self._places[peer] = _place(peer, number)
        self._sending.setsockopt(self._zmq.CONNECT_ROUTING_ID, self._places[peer])
        self._sending.connect(address)

    def _look(self) -> None:
        """Which connections have been made, and which have ended."""
        monitor = importlib.import_module("zmq.utils.monitor")
        with contextlib.suppress(self._zmq.Again):
            while True:
                event = monitor.recv_monitor_message(self._monitor, self._zmq.NOBLOCK)
                peer = self._peers.get(event["endpoint"].decode(), -1)
                if event["event"] == self._zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connected.add(peer)
                elif peer >= 0 and peer not in self._connected:
                    self._failed.add(peer)
                elif event["event"] == self._zmq.EVENT_DISCONNECTED:
                    self._gone.setdefault(peer, time.monotonic())

    def _ready(self, words: Words) -> Any:
        # one copy, which all receivers share; the words themselves may change at once
        return self._zmq.Frame(words, copy=True)

    def _send(self, peer: int, header: Words, message: Any) -> Sequence[Any]:
        header[3] = self._rank
        with contextlib.suppress(self._zmq.ZMQError):  # who is gone gets nothing; waiting for it is an error
            self._sending.send_multipart(
                [self._places[peer], self._tokens[peer] + header.tobytes(), message], copy=False
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
        """Closes its sockets when what was sent has left."""
        self._close(_LINGER_MS)
        if os.getpid() == self._maker:
            self._shut_down.wait(_STOP_SECONDS)

    def forget(self) -> None:
        """Closes its sockets, whatever is under way."""
        self._close(0)

    def _close(self, linger_ms: int) -> None:
        if os.getpid() != self._maker:
            self._closed = True
            return  # a copy in a process that was forked; its threads are elsewhere
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self in _open:
                _open.remove(self)
            if self._connecting:
                return
        if linger_ms:
            with contextlib.suppress(self._zmq.ZMQError):
                self._look()
                self._sending.getsockopt(self._zmq.EVENTS)  # lets go of what was for those that are gone
            if self._gone:
                linger_ms = _LINGER_GONE_MS
        self._shut(linger_ms)

    def _shut(self, linger_ms: int) -> None:
        """Sockets and contexts, as far as they were made, in the thread that uses them."""
        for context, sockets in self._parts:
            if len(sockets) > 1:  # one is watched by the other
                with contextlib.suppress(self._zmq.ZMQError):
                    sockets[0].disable_monitor()
            for one in sockets:
                one.close(linger=linger_ms)
            context.term()  # returns when all that was sent has left, or its time is over
        self._shut_down.set()


def _place(peer: int, number: int) -> bytes:
    """A rank, as a socket is told whom to send to; the first byte may not be 0."""
    return b"r" + peer.to_bytes(4, "little") + number.to_bytes(4, "little")


@atexit.register
def _close_all() -> None:
    for pairs in [*_open]:
        pairs.close()


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


def zmq_carrier(size: int) -> tuple[ZmqCarrier | None, str]:
    """ZeroMQ, if this rank has it.

    Args:
        size: number of ranks.

    Returns:
        It, or None and why it cannot be used.
    """
    try:
        zmq = importlib.import_module("zmq")
    except ImportError as error:
        return None, f"pyzmq cannot be imported: {error}"
    allowed, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES_PER_RANK * size
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        # ZeroMQ ends the process where it can open no more
        return None, f"ZeroMQ needs up to {needed} open files for {size} ranks, and ulimit -n says {allowed}"
    try:
        return ZmqCarrier(zmq), ""
    except (OSError, zmq.error.ZMQBaseError) as error:
        return None, f"ZeroMQ cannot listen: {type(error).__name__}: {error}"
