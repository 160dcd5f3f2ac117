"""`horovod-sparse simulate`: steps of up to 4096 ranks, and where dense begins to win."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from horovod_sparse.checks import whole_number
from horovod_sparse.cli.console import console as make_console
from horovod_sparse.cli.console import show
from horovod_sparse.cli.model import FORMAT, add_step, read_model
from horovod_sparse.cli.options import (
    add_hosts,
    add_network,
    check_picture,
    density,
    host_network_from,
    network_from,
    num_ranks,
    read_merging,
    read_recipe,
    selection_from,
    several,
)
from horovod_sparse.cli.simulate.study import Question, numbers_of, print_studies, study_of
from horovod_sparse.cost import AffineTime, AlphaBeta, Profile, network_of
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe
from horovod_sparse.merging import LAYER_TABLES

_MOST_RANKS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments.

    Args:
        parser: of the subcommand.
    """
    add = parser.add_argument
    tables = ", ".join(LAYER_TABLES)
    add("--model", required=True, metavar="TABLE|FILE", help=f"{tables}; or a file .json: {FORMAT}")
    text = "may stand several times (default: exdyna)"
    add("--sparsifier", action="append", metavar="NAME[:ARGUMENT=VALUE,...]", help=text)
    add("--density", type=density, help="kept fraction (default: the table's, or the sparsifier's)")
    text = "layerwise, single, omgs, optimal, joint, fixed(...), or a plan's file; asked anew for every P"
    add("--merging", default="optimal", metavar="STRATEGY", help=f"{text} (default: %(default)s)")
    sizes = [2, 8, 32, 128, 512, 4096]
    text = f"numbers of ranks (default: {','.join(map(str, sizes))})"
    add("--ranks", type=several(num_ranks), default=sizes, metavar="P,P,...", help=text)
    text = "number of ranks for crossings in density and bandwidth (default: the profile's, or 8)"
    add_hosts(parser)
    add("--at", type=num_ranks, metavar="P", help=text)
    text = "of horovod-sparse calibrate: latency, bandwidth and selection are taken from it"
    add("--profile", metavar="FILE", help=text)
    add_step(parser)
    add_network(parser)
    text = "of the two buckets that are simulated (default: by P and density)"
    add("--elements", type=several(_elements), metavar="N,N", help=text)
    add("--seed", type=int, default=0, help="of the gradients (default: %(default)s)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write all numbers to FILE, or to stdout")
    add("--plot", metavar="FILE", help="curves over ranks, density and bandwidth (.png, .svg, .pdf)")


def _elements(text: str) -> int:
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of elements, 1 or more")
    return number


def run(options: argparse.Namespace) -> int:
    """Simulates and prints.

    Args:
        options: of the command line.

    Returns:
        The exit code.

    Raises:
        HorovodSparseError: naming the argument that is wrong.
    """
    _check(options)
    model = read_model(options.model).on(options.gpu, options.step_seconds)
    texts = options.sparsifier or ["exdyna"]
    recipes = []
    for text in texts:
        own = options.density
        recipes.append(read_recipe(text, model.density if own is None and "density=" not in text else own))
        recipes[-1].refuse_auto("simulate")
    profile = None if options.profile is None else Profile.load(options.profile)
    question = _question(options, model.workload(profile), profile, recipes)
    console = make_console(to_stderr=options.json == "-")
    for doubt in model.doubts(profile):
        show(console, f"warning: {doubt}", "yellow")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=None)

        def tell(what: str) -> None:
            progress.update(task, description=what)

        studies = [study_of(question, recipe, tell) for recipe in recipes]
    print_studies(console, model.name, options.merging, question, studies)
    numbers = numbers_of(model.name, options.merging, question, studies)
    if options.json == "-":
        print(json.dumps(numbers, indent=1))
    elif options.json:
        Path(options.json).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        from horovod_sparse.cli.plan.picture import save
        from horovod_sparse.cli.simulate.picture import draw_studies

        save(draw_studies(question, studies), options.plot)
        show(console, f"{options.plot} written")
    return 0


def _check(options: argparse.Namespace) -> None:
    check_picture("--plot", options.plot)
    options.ranks = sorted(set(options.ranks))
    for size in (*options.ranks, options.at or 2):
        if size > _MOST_RANKS:
            raise ArgumentError("--ranks and --at", size, f"{_MOST_RANKS} at most")
    if options.elements is not None and (
        len(options.elements) != 2 or options.elements[0] >= options.elements[1]
    ):
        raise ArgumentError("--elements", options.elements, "two sizes, the smaller first, as in 1000,4000")


def _question(
    options: argparse.Namespace, workload: Any, profile: Profile | None, recipes: list[Recipe]
) -> Question:
    network, at = network_from(options), options.at or 8
    fit = selection_from(options)

    def assumed(recipe: Recipe, size: int, per_host: int) -> AffineTime:
        return fit.time(recipe.sparsifier.density).per(1 / per_host)

    def measured(recipe: Recipe, size: int, per_host: int) -> AffineTime:
        assert profile is not None  # else it is not chosen
        return profile.work(recipe.sparsifier, size, per_host)

    if profile is not None:
        found = network_of(profile)
        # what is said on the command line holds
        network = AlphaBeta(
            found.alpha_seconds if options.latency is None else options.latency,
            found.beta_seconds if options.bandwidth is None else 8.0 / options.bandwidth,
        )
        at = options.at or profile.size
        for recipe in recipes:
            profile.work(recipe.sparsifier, at)  # refuses what was not measured
    chosen = assumed if profile is None else measured
    elements = None if options.elements is None else tuple(options.elements)
    sizes, merging = tuple(options.ranks), read_merging(options.merging)
    per_host, inside = options.per_host or 1, host_network_from(options)
    for size in (*sizes, at):
        if size % per_host:
            raise ArgumentError("--per-host", per_host, f"a number that {size} ranks are a multiple of")
    return Question(workload, merging, network, sizes, at, chosen, elements, options.seed, per_host, inside)
