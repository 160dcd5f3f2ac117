"""What measurements have in common: their arguments, their launches across hosts, and where results go."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.hosts import NETWORKS, Hosts, cluster_for, machine_facts
from horovod_sparse.errors import ArgumentError, HorovodSparseError
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.sparsifiers import ALGORITHMS


def count(text: str) -> int:
    """Parses a whole number of 1 or more; `1e5` is allowed."""
    value = int(float(text))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def density(text: str) -> float:
    """Parses a density, in (0, 1]."""
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def _host_counts(text: str) -> list[int]:
    values = [count(part) for part in text.split(",")]
    if min(values) < 2:
        raise argparse.ArgumentTypeError("one host alone synchronizes nothing: 2 or more")
    return values


def bench_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that all measurements have."""
    parser = argparse.ArgumentParser(
        prog=f"scripts/bench {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--density", type=density, default=0.001, help="kept fraction (default %(default)s)")
    add("--repeat", type=count, default=10, help="repetitions (default %(default)s)")
    add("--json", metavar="FILE", help="write JSON to FILE")
    return parser


def hosts_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that all measurements across hosts have."""
    parser = bench_parser(name, about)
    add = parser.add_argument
    add("--hosts", type=_host_counts, default=[8], help="P, or several with commas (default 8)")
    add("--rate", default="1gbit", help="of every port, or several with commas (default %(default)s)")
    for network in NETWORKS:
        text = "what carries collectives; several are measured one after the other (default --gloo)"
        add(f"--{network}", dest="networks", action="append_const", const=network, help=text)
    add("--timeout", type=float, default=1800, help="seconds for one launch (default %(default)s)")
    return parser


def add_sparsifiers(parser: argparse.ArgumentParser, sparsifiers: Iterable[str]) -> None:
    """Adds the choice of sparsifiers, these by default."""
    text = "names with commas, or NAME:ARGUMENT=VALUE,... with spaces between (default %(default)s)"
    parser.add_argument("--sparsifiers", default=",".join(sparsifiers), help=text)


def named_sparsifiers(text: str, density: float) -> dict[str, str]:
    """Sparsifiers by the name that results have, as `Compression.parse` reads them.

    Args:
        text: of the command line.
        density: added where it is not given, and the sparsifier has one.

    Raises:
        ArgumentError: for a misspelt name, here and not on the hosts.

    Example:
        >>> named_sparsifiers("topk,micro", 0.01)
        {'topk': 'topk:density=0.01', 'micro': 'micro:density=0.01'}
        >>> named_sparsifiers("topk:indices=gaps", 0.01)
        {'topk:indices=gaps': 'topk:density=0.01,indices=gaps'}
    """
    words = text.split() if ":" in text else text.replace(",", " ").split()
    found = {}
    for word in words:
        name, _, arguments = word.partition(":")
        given = [item for item in arguments.split(",") if item]
        takes = name not in ALGORITHMS or ALGORITHMS[name].has_density
        if takes and not any(item.startswith("density=") for item in given):
            given.insert(0, f"density={density}")
        found[word] = f"{name}:{','.join(given)}"
        parse_recipe(found[word])
    return found


def baselines(text: str, known: Sequence[str]) -> list[str]:
    """Parses a list of baselines' names.

    Raises:
        ArgumentError: if there is none of a name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ArgumentError("--baselines", name, f"some of {', '.join(known)}, with commas")
    return names


def launch(
    module: str, settings: Mapping[str, Any], options: argparse.Namespace, hosts: Hosts, **how: Any
) -> dict[str, Any]:
    """Launches ranks once, prints their progress to stderr, and returns their result.

    Args:
        module: of the ranks.
        settings: for the ranks.
        options: of the command line.
        hosts: where.
        **how: the number of ranks and the network, as `Hosts.run` takes them.

    Returns:
        What rank 0 wrote, and the facts of the launch.

    Raises:
        BenchmarkError: see `Hosts.run`.
    """
    network, load = how.setdefault("network", "gloo"), os.getloadavg()[0]
    told = f"{how['num_ranks']} ranks, {hosts.rate}, {network}"
    how |= {"on_progress": lambda line: print(f"{told}: {line}", file=sys.stderr)}
    result = hosts.run(module, settings, timeout_s=options.timeout, **how)
    facts = {"network": network, "rate": hosts.rate, "load_before": round(load, 2)}
    return {**facts, "sparsifiers": settings["sparsifiers"], **result}


def launches(
    module: str, options: argparse.Namespace, settings_for: Callable[[int], Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Launches ranks at every rate, over every network, on every number of hosts, with all their settings.

    Args:
        module: of the ranks.
        options: of the command line.
        settings_for: called with a number of hosts.
    """
    found = []
    for rate in options.rate.split(","):
        with cluster_for(max(options.hosts), rate) as hosts:
            for network in options.networks or ["gloo"]:
                for num_hosts in options.hosts:
                    num_ranks = num_hosts * getattr(options, "ranks_per_host", 1)
                    how = {"network": network, "num_ranks": num_ranks}
                    found += [launch(module, one, options, hosts, **how) for one in settings_for(num_hosts)]
    return found


def command_line(name: str, arguments: Sequence[str]) -> str:
    """Returns the given command as text, without the option that says where results go.

    Example:
        >>> command_line("sync", ["--hosts", "2", "--json", "x.json", "--mpi"])
        'scripts/bench sync --hosts 2 --mpi'
    """
    words, kept = iter(arguments), list[str]()
    for word in words:
        if word == "--json":
            next(words)
        elif not word.startswith("--json="):
            kept.append(word)
    return shlex.join(["scripts/bench", name, *kept])


def carry_out(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    measure: Callable[[argparse.Namespace], Mapping[str, Any]],
    table: Callable[[dict[str, Any]], str],
) -> int:
    """Measures, prints tables, writes JSON if asked to, and returns the exit code."""
    options, name = parser.parse_args(arguments), parser.prog.split()[-1]
    facts = {"command": command_line(name, arguments), "benchmark": name, "machine": machine_facts()}
    try:
        result = {**facts, **measure(options)}
    except HorovodSparseError as error:
        print(f"\nbench {name}: {error}", file=sys.stderr)
        return 1
    if getattr(options, "add", False) and options.json and Path(options.json).exists():
        before = json.loads(Path(options.json).read_text())
        result["launches"] = before["launches"] + result["launches"]
        result["command"] = f"{before['command']}; {result['command']}"
    print(table(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0
