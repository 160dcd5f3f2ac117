"""`horovod-sparse plan`: buckets, what stays dense and why, and predicted iterations; and a picture."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from horovod_sparse.cli.console import console as make_console
from horovod_sparse.cli.console import show
from horovod_sparse.cli.model import FORMAT, add_step, read_model
from horovod_sparse.cli.options import (
    Source,
    add_hosts,
    add_source,
    check_picture,
    density_or_auto,
    read_merging,
    read_recipe,
    read_tensor_selection,
    source_of,
)
from horovod_sparse.cli.plan import report as plan_report
from horovod_sparse.cost import CostModel, Levels
from horovod_sparse.cost.formulas import faster_levels
from horovod_sparse.errors import ArgumentError
from horovod_sparse.merging import LAYER_TABLES, Plan, Workload, densest_plan, predict
from horovod_sparse.sparsifiers import Sparsifier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments.

    Args:
        parser: of the subcommand.
    """
    add = parser.add_argument
    tables = ", ".join(LAYER_TABLES)
    add("--model", required=True, metavar="TABLE|FILE", help=f"{tables}; or a file .json: {FORMAT}")
    add("--sparsifier", default="exdyna", metavar="NAME[:ARGUMENT=VALUE,...]", help="default: %(default)s")
    text = "kept fraction, auto (the largest for nothing) or auto(least=0.001,most=0.1)"
    add("--density", type=density_or_auto, help=f"{text} (default: the table's, or the sparsifier's)")
    text = "layerwise, single, omgs, optimal, joint, fixed(num_elements=N), fixed(bytes=N), or a plan's file"
    add("--merging", default="optimal", metavar="STRATEGY", help=f"{text} (default: %(default)s)")
    text = "all (are sparsified), cost (Eq. (1) of DRAGONN) or min_elements(N) (default: all)"
    add("--tensor-selection", metavar="RULE", help=text)
    add_step(parser)
    add_source(parser)
    add_hosts(parser)
    text = "flat, host (gradients are summed within hosts first) or auto (the faster one; default)"
    add("--levels", choices=("flat", "host", "auto"), default="auto", help=text)
    add("--framework", choices=("torch", "tensorflow"), help="where the plan shall be used; checked")
    text = (
        "buckets that wait for the network together go as one, but for those of two levels (default: with "
        "--profile, as optimizers plan)"
    )
    add("--fuse-sparse", action=argparse.BooleanOptionalAction, help=text)
    add("--rows", type=int, default=40, metavar="N", help="of each table (default: %(default)s)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write all numbers to FILE, or to stdout")
    add("--save-plan", metavar="FILE", help="for --merging, or Plan.from_dict and merging= of an optimizer")
    add("--picture", metavar="FILE", help="both queues over time (.png, .svg, .pdf)")
    text = "strategies drawn below it, with commas: layerwise, single, fixed 8192, omgs, optimal, dense"
    add("--beside", default="", metavar="NAMES", help=text)
    add("--timeline", metavar="FILE", help="of HOROVOD_TIMELINE, from rank 0: the measured step is drawn too")


def run(options: argparse.Namespace) -> int:
    """Plans and prints.

    Args:
        options: of the command line.

    Returns:
        The exit code.

    Raises:
        HorovodSparseError: naming the argument that is wrong.
    """
    _check(options)
    model = read_model(options.model).on(options.gpu, options.step_seconds)
    source = source_of(options)
    chosen_density = options.density
    if chosen_density is None and "density=" not in options.sparsifier:
        chosen_density = model.density
    recipe = read_recipe(options.sparsifier, chosen_density)
    sparsifier, merging = recipe.sparsifier, read_merging(options.merging)
    selection = None if options.tensor_selection is None else read_tensor_selection(options.tensor_selection)
    fuse = source.measured is not None if options.fuse_sparse is None else options.fuse_sparse
    if isinstance(merging, Plan):
        recipe = recipe.at(merging.density)
    step, why = model.workload(source.measured, options.update), ""
    common: dict[str, Any] = {"fuse_sparse": fuse}

    def chosen_at(density: float, **changed: Any) -> tuple[Workload, Plan, dict[str, str], CostModel]:
        cost = source.profile.cost(dataclasses.replace(sparsifier, density=density), **{**common, **changed})
        return *plan_report.chosen_plan(step, merging, selection, recipe, cost), cost

    def iteration(levels: Levels) -> float:
        workload, plan, _, cost = chosen_at(recipe.sparsifier.density, levels=levels)
        return predict(workload, plan, cost).iteration_seconds

    levels, told = _levels(options, source, recipe.sparsifier, iteration)
    common["levels"] = levels

    def seconds(plan: Plan, density: float) -> float:
        cost = source.profile.cost(dataclasses.replace(sparsifier, density=density), **common)
        return predict(step, plan, cost).iteration_seconds

    decided = isinstance(merging, Plan) and merging.density is not None
    if recipe.auto is None or decided:
        workload, plan, reasons, cost = chosen_at(recipe.sparsifier.density)
    else:
        choice = densest_plan(recipe.auto, lambda density: chosen_at(density)[1], seconds)
        plan, why = choice.plan, choice.reason
        recipe = recipe.at(plan.density)
        workload, _, reasons, cost = chosen_at(choice.density)
        workload = workload.with_dense(plan.dense)
    sparsifier = recipe.sparsifier
    name = Path(options.merging).name  # of a file, not where it is
    chosen = plan_report.Predicted(name, plan, predict(workload, plan, cost))
    predictions = plan_report.compared(workload, chosen, cost, source.profile.dense_cost())
    if source.profile.per_host > 1:  # the same with the other number of levels
        other = "flat" if levels == "host" else "host"
        beside, plan_beside, _, cost_beside = chosen_at(sparsifier.density, levels=other)
        timeline = predict(beside, plan_beside, cost_beside)
        predictions.insert(1, plan_report.Predicted(f"{name}, {other}", plan_beside, timeline))
    rows = plan_report.bucket_rows(workload, chosen, sparsifier.density)
    dense = plan_report.dense_reasons(reasons, workload)
    console = make_console(to_stderr=options.json == "-")
    for warning in (*source.warnings, *model.doubts(source.measured)):
        show(console, f"warning: {warning}", "yellow")
    sizes = {parameter.name: parameter.num_elements for parameter in workload.parameters}
    show(console, f"{model.name}, {sparsifier.describe()}, {name}: {plan}", "bold")
    show(console, source.words)
    for line in (told, why):
        if line:
            show(console, line)
    if rows:
        console.print(plan_report.bucket_table(rows, options.rows))
    if dense:
        console.print(plan_report.dense_table(dense, sizes, options.rows))
    console.print(plan_report.compared_table(predictions))
    if told := plan_report.too_small(predictions):
        show(console, told, "yellow")
    numbers = plan_report.as_json(rows, dense, predictions)
    more = {"density": why} if why else {}
    _write(options, source, {"levels": levels, **numbers, **more}, plan.to_dict())
    if options.picture:
        _draw(options, predictions, console)
    return 0


def _levels(
    options: argparse.Namespace,
    source: Source,
    sparsifier: Sparsifier,
    iteration: Callable[[Levels], float],
) -> tuple[Levels, str]:
    """With one level or two, and why in words; nothing where hosts have one rank each."""
    profile, asked = source.profile, options.levels
    if profile.per_host == 1:
        if asked == "host":
            raise ArgumentError(
                "--levels", asked, "--per-host 2 or more beside it, or a profile of such hosts"
            )
        return "flat", ""
    given = source.measured or profile, profile.num_hosts, profile.per_host, "an iteration: "
    choice = faster_levels(iteration, sparsifier, *given)
    chosen: Levels = choice.levels if asked == "auto" else asked
    return chosen, f"levels: {chosen} ({choice.reason})"


def _check(options: argparse.Namespace) -> None:
    """Refuses what can be refused before anything is computed."""
    check_picture("--picture", options.picture)
    if options.timeline and not options.picture:
        raise ArgumentError("--timeline", options.timeline, "--picture too: it is drawn there")
    if options.rows < 0:
        raise ArgumentError("--rows", options.rows, "a number of rows, 0 or more")
    names = [name.strip() for name in options.beside.split(",") if name.strip()]
    known = [*plan_report.STRATEGIES, "dense"]
    for name in names:
        if name not in known:
            raise ArgumentError("--beside", name, f"some of {', '.join(known)}, with commas")
    options.beside = names


def _write(
    options: argparse.Namespace, source: Source, numbers: dict[str, Any], plan: dict[str, Any]
) -> None:
    if options.save_plan:
        Path(options.save_plan).write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    if options.json:
        text = json.dumps(
            {"ranks": source.profile.size, "from": source.words, "plan": plan, **numbers}, indent=1
        )
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n", encoding="utf-8")


def _draw(options: argparse.Namespace, predictions: list[plan_report.Predicted], console: Console) -> None:
    from horovod_sparse.cli.plan.measured import measured_step
    from horovod_sparse.cli.plan.picture import draw_queues, save

    panels = [predictions[0], *(one for one in predictions[1:] if one.name in options.beside)]
    measured = None if options.timeline is None else measured_step(options.timeline, predictions[0].plan)
    figure = draw_queues(panels, measured)
    save(figure, options.picture)
    show(console, f"{options.picture} written")
    if measured is not None:
        text = f"measured: {measured.seconds * 1e3:.1f} ms from the first message to the end of the last"
        show(console, f"{text}, median of {measured.num_steps} steps")
