"""`scripts/bench train`: whole iterations of a known network across hosts, dense and sparsified.

Its parameters and the times of its computing, which are slept through, are those of a layer table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common.layers import LAYER_TABLES
from benchmarks.common.options import (
    add_sparsifiers,
    baselines,
    carry_out,
    hosts_parser,
    launches,
    named_sparsifiers,
)
from benchmarks.common.tables import launch_tables

_BASELINES = ("dense", "dense float16")
#: a training that synchronizes nothing: what computing alone takes where ranks share cores
ALONE = "alone"
#: behind the name of a sparsifier that is measured as it is where nothing is said of buckets
BY_DEFAULT = " by default"
#: behind the name of one whose messages are decoded to n elements each, and these added up
DENSELY = ", decoded densely"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = hosts_parser("train", __doc__)
    add = made.add_argument
    add("--model", choices=LAYER_TABLES, default="resnet50", help="(default %(default)s)")
    text = "also with each sparsifier: what is sparsified where nothing is said of buckets"
    add("--by-default", action="store_true", help=text)
    text = "also with each sparsifier: every message is decoded to all elements, and these are added up"
    add("--densely", action="store_true", help=text)
    add_sparsifiers(made, ("exdyna", "micro", "topk", "dgc"))
    add("--baselines", default=",".join(_BASELINES), help=f"and {ALONE}; default: %(default)s")
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command line asks for, as it is written to JSON."""
    sparsifiers = named_sparsifiers(options.sparsifiers, options.density)
    for asked, suffix in ((options.by_default, BY_DEFAULT), (options.densely, DENSELY)):
        if asked:
            sparsifiers |= {f"{name}{suffix}": text for name, text in sparsifiers.items()}
    facts = {"model": options.model, "density": options.density}
    settings = {
        **facts,
        "methods": [*baselines(options.baselines, (*_BASELINES, ALONE)), *sparsifiers],
        "sparsifiers": sparsifiers,
        "repeat": options.repeat,
    }
    return {**facts, "launches": launches("benchmarks.train.rank", options, lambda num_hosts: [settings])}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    return carry_out(parser(), arguments, measure, launch_tables)


if __name__ == "__main__":
    sys.exit(main())
