"""`scripts/bench train`: whole iterations of a model across hosts, dense and sparsified."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.hosts import BenchmarkError, cluster_for, machine_facts, write_json
from benchmarks.common.options import (
    PAIRS_SUFFIX,
    add_common,
    add_pairs,
    baselines,
    command_line,
    count,
    launch,
    named_sparsifiers,
)
from benchmarks.common.tables import train_tables
from horovod_sparse.errors import HorovodSparseError
from horovod_sparse.planning.workload import LAYER_TABLES

_BASELINES = ("dense", "dense float16")
#: a training that synchronizes nothing: what computing alone takes where ranks share cores
ALONE = "alone"
_REAL_MODELS = ("cnn", "digits", "lstm", "mlp")
#: behind the name of a sparsifier that is measured as it is where nothing is said of buckets
BY_DEFAULT = " by default"
#: behind the name of one whose messages are decoded to n elements each, and these added up
DENSELY = ", decoded densely"
_DEFAULT_SPARSIFIERS = ("exdyna", "micro", "topk", "dgc")

#: the module whose ranks train with a framework; started as `python -m MODULE SETTINGS RESULT`
FRAMEWORKS = {
    "torch": "benchmarks.train.torch_rank",
    "tensorflow": "benchmarks.train.tensorflow_rank",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="scripts/bench train", description=__doc__)
    models = (*_REAL_MODELS, *LAYER_TABLES)
    made.add_argument(
        "--model",
        choices=models,
        metavar="MODEL",
        default="lstm",
        help=f"one of {', '.join(_REAL_MODELS)}, which every rank computes; or a known network "
        f"({', '.join(LAYER_TABLES)}) whose computing time is slept through (default %(default)s)",
    )
    made.add_argument("--framework", choices=tuple(FRAMEWORKS), default="torch", help="default: %(default)s")
    made.add_argument(
        "--batch", type=count, default=4, help="samples per rank, real models (default %(default)s)"
    )
    made.add_argument("--bucket-bytes", type=count, help="of gradient per bucket")
    made.add_argument("--min-elements", type=count, help="smaller parameters stay dense (default: none do)")
    text = "also with each sparsifier: what is sparsified where nothing is said of buckets"
    made.add_argument("--by-default", action="store_true", help=text)
    text = "also with each sparsifier: every message is decoded to all elements, and these are added up"
    made.add_argument("--densely", action="store_true", help=text)
    add_pairs(made)
    add_common(made, _DEFAULT_SPARSIFIERS, _BASELINES)
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command line asks for, as it is written to JSON."""
    module = FRAMEWORKS[options.framework]
    if importlib.util.find_spec(module) is None:
        raise BenchmarkError(f"--framework {options.framework}: this version cannot measure it; use torch")
    if options.framework != "torch" and (options.by_default or options.densely or options.model == "digits"):
        raise BenchmarkError("--by-default, --densely and --model digits are measured in PyTorch only")
    if options.framework != "torch" and options.pairs:
        raise BenchmarkError("--pairs is measured in PyTorch only")
    if options.framework != "torch" and ALONE in options.baselines:
        raise BenchmarkError(f"--baselines {ALONE} is measured in PyTorch only")
    if options.framework != "torch" and options.model not in _REAL_MODELS:
        raise BenchmarkError(f"--model {options.model} is replayed in PyTorch only: use --framework torch")
    machine = machine_facts()
    sparsifiers = named_sparsifiers(options.sparsifiers, options.density)
    if options.by_default:
        sparsifiers |= {f"{name}{BY_DEFAULT}": text for name, text in sparsifiers.items()}
    if options.densely:
        sparsifiers |= {f"{name}{DENSELY}": text for name, text in sparsifiers.items()}
    if options.pairs:
        sparsifiers |= {f"{name}{PAIRS_SUFFIX}": text for name, text in sparsifiers.items()}
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
                    module, settings, options, hosts=hosts, network=network, num_ranks=num_ranks, total=total
                )
                for network in options.networks or ["gloo"]
                for num_ranks in options.hosts or [hosts.num_hosts]
            ]
    return {
        "benchmark": "train",
        "framework": options.framework,
        "model": options.model,
        "batch": options.batch if options.model in _REAL_MODELS else None,
        "density": options.density,
        "machine": machine,
        "launches": launches,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints.

    Args:
        arguments: of the command line; None takes the process's own.

    Returns:
        The exit code.
    """
    options = parser().parse_args(arguments)
    try:
        result = {"command": command_line("train", arguments), **measure(options)}
    except HorovodSparseError as error:
        print(f"\nbench train: {error}", file=sys.stderr)
        return 1
    console = Console(stderr=options.json == "-", width=None if sys.stderr.isatty() else 190)
    for table in train_tables(result):
        console.print(table)
    if options.json:
        write_json(result, options.json)
    if options.plot:
        from benchmarks.common.plot import plot_parts

        plot_parts(result, Path(options.plot))
    return 0


if __name__ == "__main__":
    sys.exit(main())
