"""Asked against reached: TCP transfers between the hosts of a cluster."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cluster_lib.network import RUN_MARK, end_processes
from cluster_lib.record import Cluster, locked
from cluster_lib.system import ClusterError

_HERE = Path(__file__).resolve().parent
_PORT, _PIECE = 5201, 1 << 18
# Prints `ready`, then bytes and seconds from first to last byte: the first piece starts the clock.
_RECEIVE = f"""
import socket, time
with socket.create_server(("", {_PORT})) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    buffer, total = bytearray({_PIECE}), 0
    connection.recv_into(buffer)
    started = time.perf_counter()
    while count := connection.recv_into(buffer):
        total += count
    print(total, time.perf_counter() - started, flush=True)
"""
_SEND = f"""
import socket, sys
left, piece = int(sys.argv[2]), memoryview(bytes({_PIECE}))
with socket.create_connection((sys.argv[1], {_PORT}), timeout=30) as connection:
    connection.settimeout(None)
    while left > 0:
        left -= connection.send(piece[: min(left, {_PIECE})])
"""


def measure(cluster: Cluster, num_bytes: int) -> list[dict[str, Any]]:
    """One pair of hosts, then a ring in which every host sends and receives at once, as an allreduce does."""
    if cluster.num_hosts < 2:
        raise ClusterError("a transfer needs two hosts", f"Cluster {cluster.name!r} has one.")
    ring = [(index, (index + 1) % cluster.num_hosts) for index in range(cluster.num_hosts)]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends what it started, too
    with locked(cluster.folder / "run.lock", f"cluster {cluster.name!r} is busy with a run"):
        try:
            patterns = (("one pair", [(0, 1)]), ("ring, all at once", ring))
            return [_measure(cluster, name, pairs, num_bytes) for name, pairs in patterns]
        finally:
            end_processes(cluster, of_run=True)


def _start(cluster: Cluster, index: int, program: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [str(_HERE / "enter"), cluster.host(index), sys.executable, "-c", program, *arguments],
        env={**os.environ, RUN_MARK: cluster.name},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def _measure(cluster: Cluster, name: str, pairs: list[tuple[int, int]], num_bytes: int) -> dict[str, Any]:
    receivers = [_start(cluster, target, _RECEIVE) for _, target in pairs]
    for receiver in receivers:
        assert receiver.stdout is not None
        receiver.stdout.readline()
    for source, target in pairs:
        _start(cluster, source, _SEND, cluster.address(target), str(num_bytes))
    # Ten times what it should take, and never for ever.
    deadline = time.monotonic() + 30 + 80 * num_bytes / (cluster.rate.bits_per_second or 10**9)
    rates = []
    for receiver in receivers:
        try:
            output, _ = receiver.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ClusterError(f"a transfer of {num_bytes} bytes did not end in time ({name})") from None
        if receiver.returncode:
            raise ClusterError(f"a transfer failed ({name})")
        total, seconds = output.split()
        rates.append(8 * int(total) / float(seconds))
    facts = {"pattern": name, "transfers": len(pairs), "bytes_each": num_bytes}
    return {**facts, "slowest_bits_per_second": min(rates)}
