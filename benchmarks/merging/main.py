"""`scripts/bench merging`: iterations under several plans across hosts, predicted and measured.

The network is a layer table at a quarter of its sizes and times, whose computing is slept through.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common.hosts import cluster_for
from benchmarks.common.layers import LAYER_TABLES
from benchmarks.common.options import carry_out, count, hosts_parser, launch
from benchmarks.common.tables import hosts_table

METHODS = ("layerwise", "single", "fixed 8192", "omgs", "optimal", "cost, optimal", "all dense")
#: the training that measured goes on under the plan it decided for, without another launch
GOES_ON = "optimal, same launch"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = hosts_parser("merging", __doc__)
    made.set_defaults(density=0.01, hosts=[4], repeat=7)
    add = made.add_argument
    add("--model", choices=LAYER_TABLES, default="resnet50", help="(default %(default)s)")
    text = "with commas between, but for 'cost, optimal', which is one (default: all)"
    add("--methods", type=_methods, default=METHODS, metavar="NAMES", help=text)
    add("--iterations", type=count, default=5, help="in a repetition (default %(default)s)")
    text = "other names that Horovod has seen before anything is measured (default %(default)s)"
    add("--names", type=int, default=0, help=text)
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
    settings = {name: getattr(options, name) for name in ("model", "repeat", "iterations")}
    settings["sparsifiers"] = {"topk": f"topk:density={options.density}"}
    (num_ranks,), (network,) = options.hosts, options.networks or ["gloo"]
    with cluster_for(num_ranks, options.rate, options.name) as hosts:

        def run(profile: Any, methods: Sequence[str], names: int) -> dict[str, Any]:
            asked = {**settings, "profile": profile, "methods": list(methods), "names": names}
            how = {"network": network, "num_ranks": num_ranks}
            return launch("benchmarks.merging.rank", asked, options, hosts, **how)

        first = run(None, [], 0)
        others = [run(first["profile"], [method], options.names) for method in options.methods]
    results = [item for one in (first, *others) for item in one["results"]]
    return {"model": options.model, **first, "results": results}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    return carry_out(parser(), arguments, measure, hosts_table)


if __name__ == "__main__":
    sys.exit(main())
