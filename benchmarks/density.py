"""`scripts/bench density`: iterations at several densities, and at the one that `density="auto"` takes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.hosts import Hosts, cluster_for, write_json
from benchmarks.common.options import count
from benchmarks.predictions.main import (
    TRAINING,
    add_places,
    calibrated,
    launched,
    training_settings,
    with_others,
)
from horovod_sparse.cost import Profile
from horovod_sparse.errors import ArgumentError, HorovodSparseError
from horovod_sparse.merging import LAYER_TABLES

AUTO = "auto"
#: part of an iteration that more density may cost, and by which auto may differ from the best
TOLERANCE = 0.05


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="scripts/bench density", description=__doc__)
    add = made.add_argument
    add("--model", choices=LAYER_TABLES, default="resnet50", metavar="TABLE", help="default: %(default)s")
    add("--sparsifier", default="exdyna", metavar="NAME", help="default: %(default)s")
    text = "ascending, with commas; auto is kept between the first and the last (default: %(default)s)"
    add("--densities", default="0.0003,0.001,0.003,0.01,0.03", help=text)
    text = (
        "what scripts/bench predictions wrote: its calibration of the same rate is taken, instead of one anew"
    )
    add("--calibration", metavar="FILE", help=text)
    add_places(made)
    add("--repeat", type=count, default=7, help="iterations of each (default %(default)s)")
    return made


def compare(options: argparse.Namespace, hosts: Hosts, densities: Sequence[float]) -> dict[str, Any]:
    """All densities in turn, and auto's.

    Args:
        options: of the command line.
        hosts: where.
        densities: ascending.
    """
    name = options.sparsifier
    middle = densities[len(densities) // 2]
    profile = (
        _saved(options.calibration, {"rate": hosts.rate, "ranks": options.hosts, "network": options.network})
        if options.calibration
        else None
    )
    if profile is None:
        profile = calibrated(options, hosts, [f"{name}:density={middle}"])
    limits = f"least={densities[0]},most={densities[-1]},tolerance={TOLERANCE}"
    methods = {f"{density:g}": f"{name}:density={density}" for density in densities}
    methods[AUTO] = f"{name}:density=auto({limits})"
    settings = training_settings(options.model, options.repeat, dict(methods))
    settings["profiles"] = {AUTO: json.loads(profile.to_json())}
    found = launched(TRAINING, settings, options, hosts, len(methods) * (options.repeat + 3))
    seconds = {item["method"]: item["seconds"] for item in found["results"]}
    (chosen,) = (item["facts"]["density_decided"] for item in found["results"] if item["method"] == AUTO)
    return {
        "rate": hosts.rate,
        "model": options.model,
        "sparsifier": name,
        "ranks": options.hosts,
        "network": options.network,
        "load_before": found["load_before"],
        "profile": json.loads(profile.to_json()),
        "densities": list(densities),
        "seconds": seconds,
        "auto": chosen,
        **judged(densities, {key: value["median"] for key, value in seconds.items()}),
    }


def _saved(path: str, place: Mapping[str, Any]) -> Profile | None:
    """The calibration of such hosts that a file of predictions holds, if it does."""
    for one in json.loads(Path(path).read_text())["comparisons"]:
        if all(one[key] == value for key, value in place.items()):
            return Profile.from_json(json.dumps(one["profile"]))
    return None


def judged(densities: Sequence[float], seconds: Mapping[str, float]) -> dict[str, Any]:
    """The best density by measurement, and how much longer an iteration takes with auto's.

    Args:
        densities: ascending.
        seconds: median iteration by density as text, and of auto.

    Returns:
        best: the largest density whose iteration is at most `TOLERANCE` longer than that of the smallest;
        longer: iteration of auto by that of the best, less 1; met: whether it is at most `TOLERANCE`.

    Example:
        >>> judged([0.001, 0.01], {"0.001": 1.0, "0.01": 1.04, "auto": 1.05})
        {'best': 0.01, 'longer': 0.009615, 'met': True}
    """
    limit = (1.0 + TOLERANCE) * seconds[f"{densities[0]:g}"]
    best = max(density for density in densities if seconds[f"{density:g}"] <= limit)
    longer = float(f"{seconds[AUTO] / seconds[f'{best:g}'] - 1.0:.4g}")
    return {"best": best, "longer": longer, "met": longer <= TOLERANCE}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints.

    Args:
        arguments: of the command line; None takes the process's own.

    Returns:
        The exit code.
    """
    options = parser().parse_args(arguments)
    found: list[dict[str, Any]] = []
    try:
        try:
            densities = [float(text) for text in options.densities.split(",")]
        except ValueError:
            densities = []
        if not densities or densities != sorted(set(densities)):
            raise ArgumentError("--densities", options.densities, "ascending numbers, each once")
        for rate in options.rate.split(","):
            with cluster_for(options.hosts, rate, options.name) as hosts:
                found.append(compare(options, hosts, densities))
    except HorovodSparseError as error:
        print(f"\nbench density: {error}", file=sys.stderr)
        return 1
    console = Console(stderr=options.json == "-", width=None if sys.stderr.isatty() else 160)
    console.print(_table(found))
    if options.json:
        write_json(with_others(found, options, "density", arguments), options.json)
    return 0


def _table(comparisons: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="ms per iteration")
    columns = [f"{density:g}" for density in comparisons[0]["densities"]]
    for name in ("model", "rate", *columns, "auto takes", "ms", "best", "longer", ""):
        table.add_column(name, justify="left" if name in ("model", "rate") else "right")
    for one in comparisons:
        seconds = {name: f"{1e3 * value['median']:.1f}" for name, value in one["seconds"].items()}
        verdict = "met" if one["met"] else "MISSED"
        times = [seconds[name] for name in columns]
        chosen = [f"{one['auto']:g}", seconds[AUTO], f"{one['best']:g}", f"{one['longer']:+.1%}", verdict]
        table.add_row(one["model"], one["rate"], *times, *chosen)
    return table


if __name__ == "__main__":
    sys.exit(main())
