"""`scripts/bench train`: whole iterations of a model across hosts, dense and sparsified."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common.hosts import cluster_for, machine_facts
from benchmarks.common.layers import LAYER_TABLES
from benchmarks.common.options import add_common, baselines, carry_out, count, launch, named_sparsifiers
from benchmarks.common.tables import launch_tables

_BASELINES = ("dense", "dense float16")
#: a training that synchronizes nothing: what computing alone takes where ranks share cores
ALONE = "alone"
#: the CNN of examples/pytorch_mnist.py, which every rank computes
DIGITS = "digits"
#: behind the name of a sparsifier that is measured as it is where nothing is said of buckets
BY_DEFAULT = " by default"
#: behind the name of one whose messages are decoded to n elements each, and these added up
DENSELY = ", decoded densely"
_DEFAULT_SPARSIFIERS = ("exdyna", "micro", "topk", "dgc")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="scripts/bench train", description=__doc__)
    add = made.add_argument
    add(
        "--model",
        choices=(DIGITS, *LAYER_TABLES),
        metavar="MODEL",
        default=DIGITS,
        help=f"{DIGITS}, which every rank computes; or a known network ({', '.join(LAYER_TABLES)}) whose "
        "computing time is slept through (default %(default)s)",
    )
    add("--batch", type=count, default=4, help=f"samples per rank, {DIGITS} (default %(default)s)")
    add("--bucket-bytes", type=count, help="of gradient per bucket")
    add("--min-elements", type=count, help="smaller parameters stay dense (default: none do)")
    text = "also with each sparsifier: what is sparsified where nothing is said of buckets"
    add("--by-default", action="store_true", help=text)
    text = "also with each sparsifier: every message is decoded to all elements, and these are added up"
    add("--densely", action="store_true", help=text)
    add_common(made, _DEFAULT_SPARSIFIERS, _BASELINES)
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command line asks for, as it is written to JSON."""
    machine = machine_facts()
    sparsifiers = named_sparsifiers(options.sparsifiers, options.density)
    if options.by_default:
        sparsifiers |= {f"{name}{BY_DEFAULT}": text for name, text in sparsifiers.items()}
    if options.densely:
        sparsifiers |= {f"{name}{DENSELY}": text for name, text in sparsifiers.items()}
    methods = [*baselines(options.baselines, (*_BASELINES, ALONE)), *sparsifiers]
    settings = {
        "model": options.model,
        "batch": options.batch,
        "methods": methods,
        "sparsifiers": sparsifiers,
        "options": {"bucket_bytes": options.bucket_bytes},
        "min_elements": options.min_elements,
        "repeat": options.repeat,
    }
    total = len(methods) * (options.repeat + 3)
    launches = []
    for rate in options.rate.split(",") if options.rate else [None]:
        with cluster_for(max(options.hosts) if options.hosts else None, rate, options.name) as hosts:
            launches += [
                launch(
                    "benchmarks.train.rank",
                    settings,
                    options,
                    hosts=hosts,
                    network=network,
                    num_ranks=num_ranks,
                    total=total,
                )
                for network in options.networks or ["gloo"]
                for num_ranks in options.hosts or [hosts.num_hosts]
            ]
    return {
        "benchmark": "train",
        "model": options.model,
        "batch": options.batch if options.model == DIGITS else None,
        "density": options.density,
        "machine": machine,
        "launches": launches,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    return carry_out("train", arguments, parser().parse_args(arguments), measure, launch_tables)


if __name__ == "__main__":
    sys.exit(main())
