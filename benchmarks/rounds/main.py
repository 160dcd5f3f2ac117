"""`scripts/bench rounds`: where the milliseconds of a small collective go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.hosts import LOOPBACK, BenchmarkError, cluster_for, machine_facts, write_json
from benchmarks.common.options import command_line, count, launch
from benchmarks.rounds.account import PARTS
from horovod_sparse.errors import HorovodSparseError

#: parts between those that need both clocks
_INNER = PARTS[1:-1]

#: by name: kind, collectives in a step, whether lengths change
VARIANTS = {
    "allgather, fixed": ("allgather", 1, False),
    "allgather, changing": ("allgather", 1, True),
    "allreduce, fixed": ("allreduce", 1, False),
    "8 allgathers, fixed": ("allgather", 8, False),
    "8 allgathers, changing": ("allgather", 8, True),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="scripts/bench rounds", description=__doc__)
    add = made.add_argument
    add("--ranks", type=_counts, default=[2, 4, 8], help="P, with commas (default: 2,4,8)")
    add(
        "--rate", default=LOOPBACK, help="of hosts' ports; loopback: ranks side by side (default %(default)s)"
    )
    add("--gloo", dest="networks", action="append_const", const="gloo", help="default: both")
    add("--mpi", dest="networks", action="append_const", const="mpi")
    add("--cycle-times", type=_times, default=[1.0, 0.2], help="milliseconds, with commas (default: 1,0.2)")
    add("--words", type=count, default=1024, help="that a rank puts in (default %(default)s)")
    add("--repeat", type=count, default=40, help="steps (default %(default)s)")
    add("--timeout", type=float, default=120, help="seconds for one launch (default %(default)s)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout")
    return made


def _counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def _times(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All launches, as they are written to JSON."""
    variants = [
        {"name": name, "kind": kind, "num_buckets": buckets, "words": options.words, "changing": changing}
        for name, (kind, buckets, changing) in VARIANTS.items()
    ]
    settings = {"variants": variants, "repeat": options.repeat, "sparsifiers": {}}
    machine, launches = machine_facts(), []
    with cluster_for(max(options.ranks), options.rate) as hosts:
        for network in options.networks or ["gloo", "mpi"]:
            for num_ranks in options.ranks:
                for cycle in options.cycle_times:
                    options.cycle_time = cycle
                    launches.append(
                        launch(
                            "benchmarks.rounds.rank",
                            settings,
                            options,
                            hosts=hosts,
                            network=network,
                            num_ranks=num_ranks,
                            total=options.repeat + 5,
                        )
                    )
    return {"benchmark": "rounds", "words": options.words, "machine": machine, "launches": launches}


def header() -> list[str]:
    """Of the rows of `rows`."""
    return ["", "round", "cycle and wake-up", *_INNER, "fast way", "step", "CPU", "own CPU"]


def rows(result: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title for every launch, and its rows: milliseconds, and shares of rounds.

    Args:
        result: of `measure`.
    """
    found = []
    for one in result["launches"]:
        title = f"{one['network']}, {one['ranks']} ranks, cycle {one['cycle_time_ms']:g} ms"
        lines = []
        for item in one["results"]:
            parts = item["parts"]
            # how the two are shared out hangs on the clocks, their sum does not
            outer = parts["cycle"] + parts["wake-up"]
            numbers = [parts["round"], outer, *(parts[part] for part in _INNER)]
            rest = [item[name] for name in ("step_seconds", "cpu_seconds", "own_cpu_seconds")]
            lines.append(
                [
                    item["variant"],
                    *(f"{1e3 * number:.2f}" for number in numbers),
                    f"{parts['fast']:.0%}",
                    *(f"{1e3 * number:.2f}" for number in rest),
                ]
            )
        uncertain = max(item["parts"]["uncertain"] for item in one["results"])
        found.append((f"{title}, load {one['load_before']} (clocks to {1e3 * uncertain:.2f} ms)", lines))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints.

    Args:
        arguments: of the command line; None takes the process's own.

    Returns:
        The exit code.
    """
    options = parser().parse_args(arguments)
    try:
        result = {"command": command_line("rounds", arguments), **measure(options)}
    except (HorovodSparseError, BenchmarkError) as error:
        print(f"\nbench rounds: {error}", file=sys.stderr)
        return 1
    console = Console(stderr=options.json == "-", width=None if sys.stderr.isatty() else 150)
    for title, lines in rows(result):
        table = Table(*header(), title=title)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    if options.json:
        write_json(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
