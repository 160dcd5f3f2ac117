"""`scripts/bench sync`: one gradient synchronization across hosts, dense, naive and sparsified."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common.hosts import cluster_for, machine_facts, parts_of
from benchmarks.common.layers import LAYER_TABLES, layer_table
from benchmarks.common.options import (
    PAIRS_SUFFIX,
    add_common,
    baselines,
    carry_out,
    count,
    launch,
    named_sparsifiers,
)
from benchmarks.common.tables import launch_tables
from horovod_sparse.sparsifiers import ALGORITHMS

_BASELINES = ("dense", "dense float16", "naive")
#: behind the name of a sparsifier that is synchronized on two levels
LEVELS_SUFFIX = ", two levels"
#: of DistributedDataParallel: its own allreduce, and what it has of compression
_OF_DDP = ("dense", "powersgd 1", "powersgd 4")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="scripts/bench sync", description=__doc__)
    size = made.add_mutually_exclusive_group()
    size.add_argument(
        "--elements", type=count, default=25_600_000, help="n, one tensor (default %(default)s)"
    )
    size.add_argument(
        "--layers", choices=LAYER_TABLES, metavar="TABLE", help=f"one of {', '.join(LAYER_TABLES)}"
    )
    made.add_argument("--bucket-bytes", type=count, help="of gradient per bucket, where there are layers")
    made.add_argument(
        "--engine",
        choices=("horovod", "ddp", "both"),
        default="horovod",
        help="whose collectives; ddp: those of DistributedDataParallel, with its allreduce and PowerSGD, and "
        "Horovod's dense allreduce beside them",
    )
    made.add_argument(
        "--ranks-per-host",
        type=count,
        default=1,
        metavar="L",
        help="with more than one (default %(default)s) each sparsifier is measured on two levels, too",
    )
    text = "sparsifiers in a launch, each beside the baselines: what memory holds (default %(default)s)"
    made.add_argument("--at-once", type=count, default=4, metavar="N", help=text)
    text = "each sparsifier is measured with its rounds as messages between pairs of ranks, too"
    made.add_argument("--pairs", action="store_true", help=text)
    add_common(made, list(ALGORITHMS), _BASELINES)
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command line asks for, as it is written to JSON."""
    machine = machine_facts()
    sparsifiers = named_sparsifiers(options.sparsifiers, options.density)
    references = baselines(options.baselines, _BASELINES)
    layers = None
    if options.layers:
        layers = [(item.name, item.num_elements) for item in layer_table(options.layers).workload.parameters]
    elements = sum(size for _, size in layers) if layers else options.elements
    launches = []
    with cluster_for(max(options.hosts) if options.hosts else None, options.rate, options.name) as hosts:
        for network in options.networks or ["gloo"]:
            for num_hosts in options.hosts or [hosts.num_hosts]:
                num_ranks = num_hosts * options.ranks_per_host
                for names in parts_of(list(sparsifiers), options.at_once) or [[]]:
                    behind = {name: name for name in _OF_DDP}
                    behind |= {name: sparsifiers[name] for name in names}
                    behind = {} if options.engine == "horovod" else behind
                    own = ["dense"] if options.engine == "ddp" else [*references, *names]
                    if options.engine == "horovod" and options.ranks_per_host > 1:
                        two = [name + LEVELS_SUFFIX for name in names if name != "hard_threshold"]
                        own += two + [name + PAIRS_SUFFIX for name in two if options.pairs]
                    if options.pairs:
                        own += [name + PAIRS_SUFFIX for name in names]
                    settings = {
                        "elements": elements,
                        "layers": layers,
                        "density": options.density,
                        "methods": own,
                        "ddp": behind,
                        "sparsifiers": {name: sparsifiers[name] for name in names},
                        "options": {"bucket_bytes": options.bucket_bytes},
                        "repeat": options.repeat,
                    }
                    total = len(own) * (options.repeat + 1) + 5 * (len(own) - len(references))
                    total += len(behind) * (options.repeat + 6)
                    launches.append(
                        launch(
                            "benchmarks.sync.rank",
                            settings,
                            options,
                            hosts=hosts,
                            network=network,
                            num_ranks=num_ranks,
                            total=total,
                        )
                    )
    return {
        "benchmark": "sync",
        "elements": elements,
        "layers": options.layers,
        "density": options.density,
        "ranks_per_host": options.ranks_per_host,
        "machine": machine,
        "launches": launches,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    return carry_out("sync", arguments, parser().parse_args(arguments), measure, launch_tables)


if __name__ == "__main__":
    sys.exit(main())
