"""`scripts/bench sync`: one gradient synchronization across hosts, dense, naive and sparsified."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common.options import (
    add_sparsifiers,
    baselines,
    carry_out,
    count,
    hosts_parser,
    launches,
    named_sparsifiers,
)
from benchmarks.common.tables import launch_tables
from horovod_sparse.sparsifiers import ALGORITHMS

_BASELINES = ("dense", "dense float16", "naive")
#: behind the name of a sparsifier that is synchronized on two levels
LEVELS_SUFFIX = ", two levels"
#: behind the name of a sparsifier whose rounds are messages between pairs of ranks
PAIRS_SUFFIX = ", pairs"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = hosts_parser("sync", __doc__)
    add = made.add_argument
    add("--elements", type=count, default=25_600_000, help="n, one tensor (default %(default)s)")
    text = "with more than one (default %(default)s) each sparsifier is measured on two levels, too"
    add("--ranks-per-host", type=count, default=1, metavar="L", help=text)
    text = "sparsifiers in a launch, each beside the baselines: what memory holds (default %(default)s)"
    add("--at-once", type=count, default=4, metavar="N", help=text)
    text = "each sparsifier is measured with its rounds as messages between pairs of ranks, too"
    add("--pairs", action="store_true", help=text)
    add_sparsifiers(made, ALGORITHMS)
    add("--baselines", default=",".join(_BASELINES), help="default: %(default)s")
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command line asks for, as it is written to JSON."""
    sparsifiers = named_sparsifiers(options.sparsifiers, options.density)
    references = baselines(options.baselines, _BASELINES)
    names = list(sparsifiers)
    num_parts = max(1, -(-len(names) // options.at_once))
    settings = []
    for number in range(num_parts):
        own = names[number * len(names) // num_parts : (number + 1) * len(names) // num_parts]
        methods = [*references, *own]
        if options.ranks_per_host > 1:
            methods += [name + LEVELS_SUFFIX for name in own if name != "hard_threshold"]
        if options.pairs:
            methods += [name + PAIRS_SUFFIX for name in own]
        settings.append(
            {
                "elements": options.elements,
                "density": options.density,
                "methods": methods,
                "sparsifiers": {name: sparsifiers[name] for name in own},
                "repeat": options.repeat,
            }
        )
    facts = {name: getattr(options, name) for name in ("elements", "density", "ranks_per_host")}
    return {**facts, "launches": launches("benchmarks.sync.rank", options, lambda num_hosts: settings)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    return carry_out(parser(), arguments, measure, launch_tables)


if __name__ == "__main__":
    sys.exit(main())
