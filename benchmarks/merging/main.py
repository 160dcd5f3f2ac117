"""`scripts/bench merging`: iterations under several plans across hosts, predicted and measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common.hosts import NETWORKS, cluster_for, machine_facts
from benchmarks.common.layers import LAYER_TABLES
from benchmarks.common.options import carry_out, count, launch, named_sparsifiers
from benchmarks.common.tables import hosts_table

METHODS = ("layerwise", "single", "fixed 8192", "omgs", "optimal", "cost, optimal", "all dense")
#: the training that measured goes on under the plan it decided for, without another launch
GOES_ON = "optimal, same launch"
#: behind a method's name where gradients are summed within hosts first
LEVELS_SUFFIX = ", two levels"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="scripts/bench merging", description=__doc__)
    add = made.add_argument
    add(
        "--model",
        choices=LAYER_TABLES,
        metavar="MODEL",
        default="resnet50",
        help=f"{', '.join(LAYER_TABLES)}: computing time is slept through (default %(default)s)",
    )
    add(
        "--scale", type=float, default=0.25, help="of the layer table's sizes and times (default %(default)s)"
    )
    add("--sparsifier", default="topk", help="NAME or NAME:ARGUMENT=VALUE,... (default %(default)s)")
    add("--density", type=float, default=0.01, help="kept fraction (default %(default)s)")
    add("--hosts", type=count, default=4, help="N (default %(default)s)")
    text = "with more than one (default %(default)s) every plan is measured with two levels, too"
    add("--ranks-per-host", type=count, default=1, metavar="L", help=text)
    text = "with commas between, but for 'cost, optimal', which is one (default: all)"
    add("--methods", type=_methods, default=METHODS, metavar="NAMES", help=text)
    add("--rate", help="of every port (default: that of the running cluster, or 1gbit)")
    add("--name", default="cluster", help="cluster to use if it is up (default %(default)s)")
    add("--network", choices=tuple(NETWORKS), default="gloo", help="what carries collectives (default gloo)")
    add("--cycle-time", type=float, help="HOROVOD_CYCLE_TIME in milliseconds (Horovod's own default: 1)")
    add("--repeat", type=count, default=7, help="blocks of iterations (default %(default)s)")
    add("--iterations", type=count, default=5, help="in a block (default %(default)s)")
    add(
        "--names",
        type=int,
        default=0,
        help="other names that Horovod has seen before anything is measured (default %(default)s)",
    )
    add("--timeout", type=float, default=600, help="seconds for a launch (default %(default)s)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout")
    return made


def _methods(text: str) -> tuple[str, ...]:
    """Names of some of `METHODS`.

    Example:
        >>> _methods("single,cost, optimal,optimal")
        ('single', 'optimal', 'cost, optimal')
    """
    found = [name.replace(";", ",") for name in text.replace("cost, ", "cost; ").split(",")]
    if not set(found) <= set(METHODS):
        raise argparse.ArgumentTypeError(f"{text!r} is not some of {'; '.join(METHODS)}")
    return tuple(name for name in METHODS if name in found)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command line asks for, as it is written to JSON.

    One launch measures as a training with ``merging="optimal"`` does in its warm-up, and goes on with the
    plan that it decides for. Then every plan has a launch of its own, as a training that was given the
    profile. In one process after the other plans it would be slower: Horovod's cycles take the longer the
    more names it has ever seen.
    """
    machine = machine_facts()
    (sparsifier,) = named_sparsifiers(options.sparsifier, options.density).values()
    settings = {
        "model": options.model,
        "scale": options.scale,
        "sparsifier": sparsifier,
        "sparsifiers": {options.sparsifier: sparsifier},
        "repeat": options.repeat,
        "iterations": options.iterations,
    }
    found: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    minutes = 0.0
    with cluster_for(options.hosts, options.rate, options.name) as hosts:

        def run(levels: str, profile: Any, methods: Sequence[str], names: int) -> dict[str, Any]:
            asked = {"levels": levels, "profile": profile, "methods": list(methods), "names": names}
            return launch(
                "benchmarks.merging.rank",
                {**settings, **asked},
                options,
                hosts=hosts,
                network=options.network,
                num_ranks=options.hosts * options.ranks_per_host,
                total=max(1, len(methods)) * options.repeat,
            )

        for levels in ("flat", "host") if options.ranks_per_host > 1 else ("flat",):
            first = run(levels, None, [], 0)
            others = [run(levels, first["profile"], [method], options.names) for method in options.methods]
            minutes += sum(one["minutes"] for one in (first, *others))
            suffix = LEVELS_SUFFIX if levels == "host" else ""
            told = (item for one in (first, *others) for item in one["results"])
            results += [{**item, "method": item["method"] + suffix} for item in told]
            found = {**first, **found, f"profile{suffix}": first["profile"]}
    result = {"benchmark": "merging", "model": options.model, "machine": machine, **found}
    result["ranks_per_host"] = options.ranks_per_host
    return {**result, "minutes": round(minutes, 1), "results": results}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    return carry_out("merging", arguments, parser().parse_args(arguments), measure, hosts_table)


if __name__ == "__main__":
    sys.exit(main())
