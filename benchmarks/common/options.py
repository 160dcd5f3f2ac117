"""What measurements across hosts have in common: their arguments, and how one launch is made."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.common.hosts import NETWORKS, Hosts, write_json
from horovod_sparse.errors import ArgumentError, HorovodSparseError
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.plans import TENSOR_SELECTION_VARIABLE
from horovod_sparse.sparsifiers import ALGORITHMS


def count(text: str) -> int:
    """A whole number from 1, `1e5` allowed."""
    value = int(float(text))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def density(text: str) -> float:
    """A kept fraction."""
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def _host_counts(text: str) -> list[int]:
    values = [count(part) for part in text.split(",")]
    if min(values) < 2:
        raise argparse.ArgumentTypeError("one host alone synchronizes nothing: 2 or more")
    return values


#: behind the name of a sparsifier whose rounds are messages between pairs of ranks
PAIRS_SUFFIX = ", pairs"


def add_common(parser: argparse.ArgumentParser, sparsifiers: Sequence[str], baselines: Sequence[str]) -> None:
    """Adds them.

    Args:
        parser: of a measurement.
        sparsifiers: the default.
        baselines: all that there are.
    """
    add = parser.add_argument
    add("--density", type=density, default=0.001, help="kept fraction (default %(default)s)")
    add("--hosts", type=_host_counts, help="P, or several with commas (default: all that are up, or 8)")
    add(
        "--rate",
        help="of every port, in train several with commas; loopback: ranks side by side (default: that of "
        "the running cluster, or 1gbit)",
    )
    add("--name", default="cluster", help="cluster to use if it is up (default %(default)s)")
    for name in NETWORKS:
        text = "what carries collectives; several are measured one after the other (default --gloo)"
        add(f"--{name}", dest="networks", action="append_const", const=name, help=text)
    add(
        "--sparsifiers",
        default=",".join(sparsifiers),
        help="names with commas, or NAME:ARGUMENT=VALUE,... with spaces between (default %(default)s)",
    )
    add("--baselines", default=",".join(baselines), help="default: %(default)s")
    add("--cycle-time", type=float, help="HOROVOD_CYCLE_TIME in milliseconds (Horovod's own default: 1)")
    add("--repeat", type=count, default=10, help="repetitions (default %(default)s)")
    add("--timeout", type=float, default=1800, help="seconds for one launch (default %(default)s)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout")


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
    """Names of baselines.

    Raises:
        ArgumentError: if there is none of a name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ArgumentError("--baselines", name, f"some of {', '.join(known)}, with commas")
    return names


def command_line(name: str, arguments: Sequence[str] | None) -> str:
    """The command that was given, without where its results went.

    Args:
        name: of the measurement.
        arguments: its own; None takes the process's.

    Example:
        >>> command_line("sync", ["--hosts", "2", "--json", "x.json", "--mpi"])
        'scripts/bench sync --hosts 2 --mpi'
    """
    words, kept = list(sys.argv[1:] if arguments is None else arguments), list[str]()
    while words:
        word = words.pop(0)
        if word == "--json":
            if words and not words[0].startswith("--"):
                words.pop(0)
        elif not word.startswith("--json="):
            kept.append(word)
    return shlex.join(["scripts/bench", name, *kept])


def launch(
    module: str,
    settings: Mapping[str, Any],
    options: argparse.Namespace,
    *,
    hosts: Hosts,
    network: str,
    num_ranks: int,
    total: int,
) -> dict[str, Any]:
    """One launch of ranks, with a progress bar.

    Args:
        module: of the ranks; its rank 0 prints "done WHAT NUMBER" after every piece of work.
        settings: for the ranks.
        options: of the command line.
        hosts: where.
        network: one of `NETWORKS`.
        num_ranks: P.
        total: pieces of work.

    Returns:
        What rank 0 wrote, and the facts of the launch.

    Raises:
        BenchmarkError: see `Hosts.run`.
    """
    variables = {TENSOR_SELECTION_VARIABLE: "all"}  # what is asked for is measured, whether it can win or not
    if options.cycle_time is not None:
        variables["HOROVOD_CYCLE_TIME"] = str(options.cycle_time)
    load, started = os.getloadavg()[0], time.monotonic()
    with Progress(
        TextColumn(f"{num_ranks} hosts, {hosts.rate}, {network}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        bar = progress.add_task("starting", total=total)

        def on_progress(line: str) -> None:
            word, _, rest = line.partition(" ")
            if word == "done":
                progress.update(bar, advance=1, description=rest.rpartition(" ")[0])

        result = hosts.run(
            module,
            settings,
            num_ranks=num_ranks,
            network=NETWORKS[network],
            variables=variables,
            timeout_s=options.timeout,
            on_progress=on_progress,
        )
    return {
        "network": network,
        "rate": hosts.rate,
        "cycle_time_ms": options.cycle_time,
        "load_before": round(load, 2),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "sparsifiers": settings["sparsifiers"],
        **result,
    }


def carry_out(
    name: str,
    arguments: Sequence[str] | None,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Mapping[str, Any]],
    table: Callable[[dict[str, Any]], str],
) -> int:
    """Measures, prints tables, and writes the JSON that was asked for.

    Args:
        name: of the measurement.
        arguments: its own; None takes the process's.
        options: parsed from them.
        measure: gives the result.
        table: makes Markdown of it.

    Returns:
        The exit code.
    """
    try:
        result = {"command": command_line(name, arguments), **measure(options)}
    except HorovodSparseError as error:
        print(f"\nbench {name}: {error}", file=sys.stderr)
        return 1
    if getattr(options, "add", False) and options.json not in (None, "-") and Path(options.json).exists():
        before = json.loads(Path(options.json).read_text())
        result["launches"] = before["launches"] + result["launches"]
        result["command"] = f"{before['command']}; {result['command']}"
    # tables go where they do not mix with JSON
    print(table(result), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json:
        write_json(result, options.json)
    return 0
