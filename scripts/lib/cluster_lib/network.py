"""Making a cluster, taking it away, and reading its counters.

No interface ever exists in the machine's own namespace: the switch is a bridge in a namespace of
its own, and every cable (a pair of veth) is made there, with its other end inside the host.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster_lib.record import INTERFACE, NAMESPACES, STATE, Cluster, load, locked
from cluster_lib.system import ClusterError, run

_LATENCY = Path(__file__).with_name("latency.py")
LOCK = STATE / "lock"
# Marks what a run started, and nothing that the user started with `enter`.
RUN_MARK = "HOROVOD_SPARSE_CLUSTER_RUN"


def make(cluster: Cluster) -> None:
    """Builds the cluster. What a killed `up` has left is recorded, and `down` removes it.

    Raises:
        ClusterError: the name is taken, or a namespace of that name is somebody else's.
    """
    with locked(LOCK):
        if (found := load(cluster.name)) is not None:
            raise ClusterError(
                f"there is a cluster {cluster.name!r} already, {found.num_hosts} hosts at {found.rate.text}",
                f"Remove it with scripts/cluster down --name {cluster.name}, or take another --name.",
            )
        foreign = [namespace for namespace in cluster.namespaces if (NAMESPACES / namespace).exists()]
        if foreign:
            raise ClusterError(
                f"there is a network namespace {foreign[0]} that scripts/cluster did not make",
                "Take another --name.",
            )
        cluster.save()
        try:
            _build(cluster)
            cluster.save_hosts()
        except BaseException:
            _remove(cluster)
            raise


def _build(cluster: Cluster) -> None:
    switch = cluster.switch
    _add_namespace(switch)
    bridge = ("type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
    run("ip", "-n", switch, "link", "add", "bridge", *bridge)
    run("ip", "-n", switch, "link", "set", "bridge", "up")
    for index in range(cluster.num_hosts):
        host, port = cluster.namespace(index), f"port{index}"
        _add_namespace(host)
        run("ip", "-n", host, "link", "set", "lo", "up")
        run(
            *("ip", "-n", switch, "link", "add", port, "type", "veth"),
            *("peer", "name", INTERFACE, "netns", host),
        )
        run("ip", "-n", switch, "link", "set", port, "master", "bridge")
        run("ip", "-n", host, "address", "add", f"{cluster.address(index)}/24", "dev", INTERFACE)
        if cluster.rate.bits_per_second is not None:
            # One limits what the host sends, the other what it receives.
            run("tc", "-n", host, "qdisc", "add", "dev", INTERFACE, "root", *cluster.rate.tbf)
            run("tc", "-n", switch, "qdisc", "add", "dev", port, "root", *cluster.rate.tbf)
            run("ip", "-n", host, "link", "set", INTERFACE, "gso_max_size", str(cluster.rate.piece_bytes))
        run("ip", "-n", host, "link", "set", INTERFACE, "up")
        run("ip", "-n", switch, "link", "set", port, "up")
        if cluster.latency.seconds:
            _hold_packets_back(host, cluster.latency.seconds)


def _hold_packets_back(namespace: str, seconds: float) -> None:
    """Start the process that delays a host's packets; it ends with the host's other processes."""
    command = ["ip", "netns", "exec", namespace, sys.executable, str(_LATENCY), str(seconds)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, start_new_session=True, text=True)
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline() != "ready\n":
        words = process.stderr.read().strip().splitlines()[-5:]
        raise ClusterError("packets cannot be held back here: this takes iptables and NFQUEUE", *words)


def _add_namespace(namespace: str) -> None:
    run("ip", "netns", "add", namespace)
    # A link without IPv6 is silent, so the counters see the ranks' traffic alone; the loopback
    # exists already and keeps it. A kernel without IPv6 has nothing to switch off.
    script = "echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6"
    run("ip", "netns", "exec", namespace, "sh", "-c", script, may_fail=True)


def remove(name: str) -> bool:
    """Remove a cluster in whatever state; return False if there was none."""
    with locked(LOCK):
        found = load(name)
        if found is not None:
            _remove(found)
        return found is not None


def _remove(cluster: Cluster) -> None:
    # A namespace lives as long as a process in it does.
    end_processes(cluster)
    for namespace in cluster.namespaces:
        if (NAMESPACES / namespace).exists():
            # With it go its interfaces, and with those the other ends of their cables.
            run("ip", "netns", "delete", namespace)
    cluster.forget()


def processes(cluster: Cluster, of_run: bool = False) -> list[int]:
    """The processes on the hosts; with of_run those alone that a run has started."""
    found: list[int] = []
    for namespace in cluster.namespaces:
        if (NAMESPACES / namespace).exists():
            found += map(int, run("ip", "netns", "pids", namespace, may_fail=True).split())
    return [pid for pid in found if not of_run or _is_of_run(pid)]


def _is_of_run(pid: int) -> bool:
    try:
        return f"\0{RUN_MARK}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def end_processes(cluster: Cluster, of_run: bool = False, patience_s: float = 2.0) -> int:
    """End the processes on the hosts: kindly, and after `patience_s` by force. How many there were."""
    first = processes(cluster, of_run)
    kind, started = True, time.monotonic()
    remaining = first
    while remaining:
        elapsed_s = time.monotonic() - started
        if elapsed_s > patience_s + 10:
            raise ClusterError(f"processes {remaining} on cluster {cluster.name!r} cannot be ended")
        if kind or elapsed_s > patience_s:
            for pid in remaining:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if kind else signal.SIGKILL)
            kind = False
        time.sleep(0.02)
        remaining = processes(cluster, of_run)
    return len(first)


def counters(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the bytes over every host's interface since `up`, read at once at the switch's ports."""
    links = json.loads(run("ip", "-n", cluster.switch, "-s", "-j", "link", "show", "type", "veth"))
    ports = {link["ifname"]: link["stats64"] for link in links}
    found = []
    for index, host in enumerate(cluster.hosts):
        port = f"port{index}"
        # What the port receives is what the host sends.
        moved = {"tx_bytes": ports[port]["rx"]["bytes"], "rx_bytes": ports[port]["tx"]["bytes"]}
        place = {"host": host, "address": cluster.address(index)}
        found.append({**place, **moved})
    return found
