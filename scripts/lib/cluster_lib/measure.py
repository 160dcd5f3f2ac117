"""Asked against reached: TCP transfers between the hosts of a cluster."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster_lib.errors import ClusterError
from cluster_lib.network import RUN_MARK, counters, end_processes
from cluster_lib.record import Cluster, locked

_HERE = Path(__file__).resolve().parent
_PORT = 5201


@dataclass(frozen=True)
class Measurement:
    """One pattern of transfers and the payload it moved, bits per second of the slowest transfer."""

    pattern: str
    transfers: int
    bytes_each: int
    slowest_bits_per_second: float
    dropped_packets: int


def measure(cluster: Cluster, num_bytes: int) -> list[Measurement]:
    """One pair of hosts, then a ring in which every host sends and receives at once, as an allreduce does."""
    if cluster.num_hosts < 2:
        raise ClusterError("a transfer needs two hosts", f"Cluster {cluster.name!r} has one.")
    hosts = range(cluster.num_hosts)
    patterns = {
        "one pair": [(0, 1)],
        "ring, all at once": [(index, (index + 1) % cluster.num_hosts) for index in hosts],
    }
    with locked(cluster.folder / "run.lock", f"cluster {cluster.name!r} is busy with a run"):
        try:
            return [_measure(cluster, name, pairs, num_bytes) for name, pairs in patterns.items()]
        finally:
            end_processes(cluster, of_run=True)


def _start(cluster: Cluster, index: int, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [str(_HERE / "enter"), cluster.host(index), sys.executable, str(_HERE / "transfer.py"), *arguments],
        env={**os.environ, RUN_MARK: cluster.name},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def _measure(cluster: Cluster, name: str, pairs: Iterable[tuple[int, int]], num_bytes: int) -> Measurement:
    drops = sum(counter.dropped for counter in counters(cluster))
    pairs = list(pairs)
    receivers = [_start(cluster, target, "receive", str(_PORT)) for _, target in pairs]
    for receiver in receivers:
        assert receiver.stdout is not None
        receiver.stdout.readline()
    senders = [
        _start(cluster, source, "send", cluster.address(target), str(_PORT), str(num_bytes))
        for source, target in pairs
    ]
    # Ten times what it should take, and never for ever.
    bits = cluster.rate.bits_per_second or 10**9
    deadline = time.monotonic() + 30 + 10 * 8 * num_bytes / bits
    rates = []
    for sender, receiver in zip(senders, receivers, strict=True):
        try:
            output, _ = receiver.communicate(timeout=max(0.1, deadline - time.monotonic()))
            sender.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ClusterError(f"a transfer of {num_bytes} bytes did not end in time ({name})") from None
        if sender.returncode or receiver.returncode:
            raise ClusterError(f"a transfer failed ({name})")
        total, seconds = output.split()
        rates.append(8 * int(total) / float(seconds))
    dropped = sum(counter.dropped for counter in counters(cluster)) - drops
    return Measurement(name, len(pairs), num_bytes, min(rates), dropped)
