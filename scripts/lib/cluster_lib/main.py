"""The commands of scripts/cluster."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from cluster_lib import launch
from cluster_lib.measure import measure
from cluster_lib.network import counters, make, remove
from cluster_lib.record import Cluster, load, load_all, load_complete
from cluster_lib.system import ClusterError, check_machine

_ENTER = Path(__file__).resolve().parent / "enter"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/cluster",
        description="Many hosts on one machine: network namespaces with own addresses, names and rates,"
        " and ranks of Horovod on them. Needs root. See docs/cluster.md.",
    )
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default="cluster", help="which cluster (default: %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", parents=[named], help="make a cluster")
    up.add_argument("--hosts", type=int, default=8, help="how many hosts (default: %(default)s)")
    up.add_argument(
        "--rate", default="1gbit", help="what each may send, and receive: 1gbit, 100mbit, unlimited"
    )
    up.add_argument("--latency", default="0ms", help="added to every message: 20ms (default: %(default)s)")

    run = commands.add_parser(
        "run", parents=[named], help="run ranks on the hosts", usage="%(prog)s [options] -- COMMAND"
    )
    kind = run.add_mutually_exclusive_group()
    kind.add_argument("--gloo", dest="kind", action="store_const", const="gloo", help="(default)")
    kind.add_argument("--mpi", dest="kind", action="store_const", const="mpi", help="launch with mpirun")
    run.set_defaults(kind="gloo")
    run.add_argument("-np", type=int, metavar="N", help="how many ranks (default: one a host)")
    run.add_argument("--timeout", type=float, metavar="SECONDS", help="end it after that, with exit code 124")

    enter = commands.add_parser(
        "enter",
        parents=[named],
        help="run one command on one host",
        usage="%(prog)s [options] HOST -- COMMAND",
    )
    enter.add_argument("host", type=int, help="its number, from 0")

    speed = commands.add_parser("measure", parents=[named], help="asked against reached, by TCP transfers")
    speed.add_argument("--megabytes", type=float, default=100, help="per transfer (default: %(default)s)")

    status = commands.add_parser("status", help="what is up, and what went over each interface")
    status.add_argument("--name", help="this cluster only")

    down = commands.add_parser("down", help="remove a cluster, and end what runs on it")
    which = down.add_mutually_exclusive_group()
    which.add_argument("--name", default="cluster", help="which cluster (default: %(default)s)")
    which.add_argument("--all", action="store_true", help="every cluster")
    return parser


def _up(options: argparse.Namespace) -> int:
    cluster = Cluster.check(options.name, options.hosts, options.rate, options.latency)
    make(cluster)
    print(
        f"cluster {cluster.name}: {cluster.num_hosts} hosts at {cluster.rate.text},"
        f" {cluster.host(0)} to {cluster.host(cluster.num_hosts - 1)}",
        file=sys.stderr,
    )
    return 0


def _run(options: argparse.Namespace) -> int:
    cluster = load_complete(options.name)
    num_ranks = cluster.num_hosts if options.np is None else options.np
    return launch.run(cluster, options.kind, num_ranks, options.words, options.timeout)


def _enter(options: argparse.Namespace) -> int:
    cluster = load_complete(options.name)
    if not 0 <= options.host < cluster.num_hosts:
        raise ClusterError(f"host {options.host} is out of range", f"Allowed: 0 to {cluster.num_hosts - 1}.")
    os.execv(_ENTER, [str(_ENTER), cluster.host(options.host), *options.words])


def _measure(options: argparse.Namespace) -> int:
    cluster = load_complete(options.name)
    asked, found = cluster.rate.bits_per_second, measure(cluster, round(options.megabytes * 10**6))
    print(json.dumps([{"asked_bits_per_second": asked, **one} for one in found], indent=2))
    return 0


def _state(cluster: Cluster) -> dict[str, Any]:
    """Returns a cluster's facts and its hosts' counters; an incomplete cluster has no hosts."""
    try:
        hosts = counters(load_complete(cluster.name))
    except ClusterError:
        hosts = []
    return {"name": cluster.name, "rate": cluster.rate.text, "latency": cluster.latency.text, "hosts": hosts}


def _status(options: argparse.Namespace) -> int:
    if options.name is not None and load(options.name) is None:
        raise ClusterError(f"there is no cluster {options.name!r}")
    states = [_state(one) for one in load_all() if options.name in (None, one.name)]
    print(json.dumps(states, indent=2))
    return 0


def _down(options: argparse.Namespace) -> int:
    names = [cluster.name for cluster in load_all()] if options.all else [options.name]
    for name in names:
        print(f"cluster {name}: {'removed' if remove(name) else 'not there'}", file=sys.stderr)
    return 0


_COMMANDS = {"up": _up, "run": _run, "enter": _enter, "measure": _measure, "status": _status, "down": _down}


def main() -> int:
    """Read the command line, do it, and return the exit code."""
    arguments, words = sys.argv[1:], []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, words = arguments[:cut], arguments[cut + 1 :]
    parser = _parser()
    options = parser.parse_args(arguments)
    options.words = words
    if (options.command in ("run", "enter")) != bool(words):
        parser.error("run and enter, and they alone, need -- and then a COMMAND")
    try:
        check_machine()
        return _COMMANDS[options.command](options)
    except ClusterError as error:
        print(f"\ncluster: {error}", *(f"  {line}" for line in error.advice), sep="\n", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
