"""`scripts/bench predictions`: what `plan` and `worth-it` predict from a calibration, and what it is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.hosts import NETWORKS, Hosts, cluster_for, machine_facts, write_json
from benchmarks.common.options import command_line, count, launch, named_sparsifiers
from benchmarks.train.main import ALONE
from horovod_sparse.cli.model import read_model
from horovod_sparse.cost import Profile
from horovod_sparse.errors import HorovodSparseError
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.merging import LAYER_TABLES, Plan, Workload, fixed, predict
from horovod_sparse.planning.advice import CANDIDATES, verdict_of
from horovod_sparse.planning.optimal import optimal
from horovod_sparse.plans.plan import DEFAULT_BUCKET_BYTES

TRAINING = "benchmarks.train.torch_rank"
CALIBRATION = "benchmarks.predictions.calibration_rank"
#: the answer of `worth-it`, as a method
ANSWER = "worth-it"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="scripts/bench predictions", description=__doc__)
    add = made.add_argument
    text = f"layer tables with commas ({', '.join(LAYER_TABLES)}; default %(default)s)"
    add("--models", default="resnet50,vgg16_cifar", help=text)
    add("--sparsifiers", default="topk,exdyna", help="as for train (default %(default)s)")
    add("--density", type=float, default=0.001, help="kept fraction (default %(default)s)")
    add_places(made)
    add("--repeat", type=count, default=7, help="iterations of each (default %(default)s)")
    return made


def add_places(made: argparse.ArgumentParser) -> None:
    """Adds where it is measured, and what becomes of the results.

    Args:
        made: the command line of a comparison with a calibration.
    """
    add = made.add_argument
    add("--hosts", type=count, default=4, help="P (default %(default)s)")
    add("--rate", default="1gbit", help="of every port, several with commas (default %(default)s)")
    add("--name", default="cluster", help="cluster to use if it is up and has the rate (default %(default)s)")
    add("--network", choices=tuple(NETWORKS), default="gloo", help="what carries collectives (default gloo)")
    add("--budget", default="60s", help="of the calibration (default %(default)s)")
    add("--cycle-time", type=float, help="HOROVOD_CYCLE_TIME in milliseconds (Horovod's own default: 1)")
    add("--timeout", type=float, default=600, help="seconds for a launch (default %(default)s)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout")
    add("--add", action="store_true", help="to what --json FILE has of other rates and models")


def launched(
    module: str, settings: Mapping[str, Any], options: argparse.Namespace, hosts: Hosts, total: int
) -> dict[str, Any]:
    """One launch on the hosts; see `launch`."""
    return launch(
        module,
        settings,
        options,
        hosts=hosts,
        network=options.network,
        num_ranks=options.hosts,
        total=total,
    )


def calibrated(options: argparse.Namespace, hosts: Hosts, texts: Sequence[str]) -> Profile:
    """What `horovod-sparse calibrate` finds on the hosts.

    Args:
        options: of the command line.
        hosts: where.
        texts: sparsifiers, one of each name.
    """
    arguments = ["--budget", options.budget]
    for text in texts:
        arguments += ["--sparsifier", text]
    found = launched(CALIBRATION, {"arguments": arguments, "sparsifiers": {}}, options, hosts, 1)
    return Profile.from_json(json.dumps(found["profile"]))


def training_settings(model: str, repeat: int, methods: Mapping[str, str | None]) -> dict[str, Any]:
    """For the ranks of `scripts/bench train`.

    Args:
        model: a layer table.
        repeat: iterations of each method.
        methods: sparsifiers as text by the method's name; None for baselines.
    """
    return {
        "model": model,
        "batch": 1,
        "methods": list(methods),
        "sparsifiers": {name: text for name, text in methods.items() if text is not None},
        "options": {"bucket_bytes": None},
        "min_elements": None,
        "repeat": repeat,
    }


def workload_of(model: str, profile: Profile, alone: Mapping[str, Any]) -> Workload:
    """The step as its time and `--profile` give it to the commands.

    Args:
        model: a layer table.
        profile: of the hosts: it has the optimizer's update.
        alone: result of the training that synchronizes nothing, as a user measures his own: its forward and
            backward, those of the slowest rank.
    """
    parts = alone["slowest_parts"]
    read = read_model(model).on(None, parts["forward"] + parts["backward"])
    update = profile.update_seconds([parameter.num_elements for parameter in read.parameters])
    return read.workload(update_seconds=update)


def predicted(workload: Workload, profile: Profile, recipes: Mapping[str, str]) -> dict[str, float]:
    """Seconds of an iteration as `plan` has them, of the buckets that an optimizer makes by default.

    Args:
        workload: of the model.
        profile: of the hosts.
        recipes: sparsifiers as text, by name.
    """
    every = workload.with_dense([parameter.name for parameter in workload.parameters])
    nothing = Plan((), every.dense_names)
    found = {"dense": predict(every, nothing, profile.dense_cost()).iteration_seconds}
    for name, text in recipes.items():
        cost = profile.cost(parse_recipe(text).sparsifier, fuse_sparse=True)
        plan = fixed(bytes=DEFAULT_BUCKET_BYTES)(workload, cost)
        found[name] = predict(workload, plan, cost).iteration_seconds
    return found


def positions(plan: Plan, workload: Workload) -> dict[str, list[Any]]:
    """A plan by positions of parameters in forward order: in a training they have other names."""
    place = {parameter.name: number for number, parameter in enumerate(workload.parameters)}
    return {
        "buckets": [[place[name] for name in bucket] for bucket in plan.buckets],
        "dense": [place[name] for name in plan.dense],
    }


def compare(options: argparse.Namespace, hosts: Hosts, model: str, profile: Profile) -> dict[str, Any]:
    """A model at one rate: predictions first, then the measurement.

    Args:
        options: of the command line.
        hosts: where.
        model: a layer table.
        profile: of the hosts.
    """
    recipes = named_sparsifiers(options.sparsifiers, options.density)
    settings = training_settings(model, options.repeat, {ALONE: None})
    (alone,) = launched(TRAINING, settings, options, hosts, options.repeat + 3)["results"]
    workload = workload_of(model, profile, alone)
    told = predicted(workload, profile, recipes)
    known = [text for text in CANDIDATES if parse_recipe(text).sparsifier.name in profile.selection]
    verdict = verdict_of(workload, profile, [parse_recipe(text) for text in known], 1.0)
    answer = verdict.recipe.describe()
    plan = optimal(workload, profile.cost(verdict.recipe.sparsifier))
    told[ANSWER] = verdict.sparse_seconds
    settings = training_settings(model, options.repeat, {"dense": None, **recipes, ANSWER: answer})
    settings["plans"] = {ANSWER: positions(plan, workload)}
    found = launched(TRAINING, settings, options, hosts, len(told) * (options.repeat + 3))
    rows = []
    for item in found["results"]:
        seconds = item["seconds"]
        rows.append(
            {
                "method": item["method"],
                "recipe": settings["sparsifiers"].get(item["method"], "none"),
                "predicted_seconds": float(f"{told[item['method']]:.6g}"),
                "seconds": seconds,
                "error": float(f"{told[item['method']] / seconds['median'] - 1.0:.4g}"),
                "parts": item["parts"],
                "slowest_parts": item["slowest_parts"],
                "cpu_seconds": item["cpu_seconds"],
            }
        )
    return {
        "rate": hosts.rate,
        "model": model,
        "ranks": options.hosts,
        "network": options.network,
        "load_before": found["load_before"],
        "step_seconds": float(f"{workload.step_seconds:.6g}"),
        "update_seconds": float(f"{workload.update_seconds:.6g}"),
        "alone": {name: alone[name] for name in ("seconds", "parts", "slowest_parts")},
        "worth_it": {**dataclasses.asdict(verdict), "recipe": answer, "answer": verdict.answer},
        "profile": json.loads(profile.to_json()),
        "rows": rows,
    }


def with_others(
    found: Sequence[Mapping[str, Any]],
    options: argparse.Namespace,
    name: str,
    arguments: Sequence[str] | None,
) -> dict[str, Any]:
    """What is written: comparisons, and with `--add` those that the file has of other rates and models.

    Args:
        found: comparisons, each of a rate and a model.
        options: of the command line.
        name: of the measurement.
        arguments: its own; None takes the process's.
    """
    command = command_line(name, arguments).replace(" --add", "")
    comparisons = [{**one, "command": command} for one in found]
    if options.add and options.json and Path(options.json).exists():
        new = {(one["rate"], one["model"]) for one in found}
        before = json.loads(Path(options.json).read_text())["comparisons"]
        comparisons = [*(one for one in before if (one["rate"], one["model"]) not in new), *comparisons]
    commands = "; ".join(dict.fromkeys(one["command"] for one in comparisons))
    return {"command": commands, "benchmark": name, "machine": machine_facts(), "comparisons": comparisons}


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
        recipes = named_sparsifiers(options.sparsifiers, options.density)
        for rate in options.rate.split(","):
            with cluster_for(options.hosts, rate, options.name) as hosts:
                profile = calibrated(options, hosts, list(recipes.values()))
                found += [compare(options, hosts, model, profile) for model in options.models.split(",")]
    except HorovodSparseError as error:
        print(f"\nbench predictions: {error}", file=sys.stderr)
        return 1
    console = Console(stderr=options.json == "-", width=None if sys.stderr.isatty() else 160)
    console.print(_table(found))
    if options.json:
        write_json(with_others(found, options, "predictions", arguments), options.json)
    return 0


def _table(comparisons: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="ms per iteration")
    for name in ("model", "rate", "method", "predicted", "measured", "quartiles", "off by"):
        table.add_column(name, justify="left" if name in ("model", "rate", "method") else "right")
    for one in comparisons:
        for row in one["rows"]:
            seconds = row["seconds"]
            table.add_row(
                one["model"],
                one["rate"],
                row["method"],
                f"{1e3 * row['predicted_seconds']:.1f}",
                f"{1e3 * seconds['median']:.1f}",
                f"{1e3 * seconds['low']:.1f} {1e3 * seconds['high']:.1f}",
                f"{row['error']:+.1%}",
            )
    return table


if __name__ == "__main__":
    sys.exit(main())
