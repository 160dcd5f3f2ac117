"""Holds back every packet that comes to a host: its link's latency. Runs in the host's namespace.

The kernel queues the packets for this process (iptables' NFQUEUE) and gives their numbers alone.
They are behind the sender's and the switch's token buckets then, so a packet takes the time of its
bytes, then the latency, as on a long cable.
"""

import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

_NETLINK_NETFILTER, _QUEUE = 12, 3 << 8
_CONFIG, _VERDICT_BATCH = 2, 3
_NUM_PACKETS = 1 << 20


def _message(kind: int, *attributes: tuple[int, bytes]) -> bytes:
    """A request of nfnetlink_queue to queue 0."""
    body = struct.pack(">BBH", socket.AF_UNSPEC, 0, 0)
    for number, value in attributes:
        body += struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)
    return struct.pack("=IHHII", 16 + len(body), _QUEUE | kind, 1, 0, 0) + body


def _opened() -> socket.socket:
    """The queue, whose packets stay in the kernel, uncut."""
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    netlink.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
    netlink.setsockopt(270, 5, 1)  # NETLINK_NO_ENOBUFS: packets without a number would wait for ever
    netlink.bind((0, 0))
    netlink.send(_message(_CONFIG, (1, struct.pack(">BBH", 1, 0, 0))))  # bind
    whole = struct.pack(">I", 1 << 2)  # NFQA_CFG_F_GSO
    meta = struct.pack(">IB", 0, 1)  # NFQNL_COPY_META
    netlink.send(_message(_CONFIG, (2, meta), (3, struct.pack(">I", _NUM_PACKETS)), (4, whole), (5, whole)))
    netlink.setblocking(False)
    return netlink


def main() -> None:
    """Delays for ever."""
    latency = float(sys.argv[1])
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # before ranks, who fill all cores
    netlink = _opened()
    rule = ["iptables", "-w", "-t", "mangle", "-A", "PREROUTING", "-i", "eth0", "-j", "NFQUEUE"]
    subprocess.run(rule, check=True)
    print("ready", flush=True)
    held: deque[tuple[float, bytes]] = deque()
    while True:
        patience = max(0.0, held[0][0] - time.monotonic()) if held else None
        select.select([netlink], [], [], patience)
        last, now = None, time.monotonic()
        try:
            while True:
                packet = netlink.recv(4096)
                if packet[4:6] == b"\x00\x03":
                    held.append((now + latency, packet[24:28]))
        except BlockingIOError:
            pass
        while held and held[0][0] <= now:
            last = held.popleft()[1]
        if last is not None:  # all up to this number
            netlink.send(_message(_VERDICT_BATCH, (2, struct.pack(">I", 1) + last)))


if __name__ == "__main__":
    main()
