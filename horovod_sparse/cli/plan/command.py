"""`horovod-sparse plan`: whether it is worth it, buckets, what stays dense and why, at one size or many."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from horovod_sparse.cli.console import console as make_console
from horovod_sparse.cli.console import plain_table, show
from horovod_sparse.cli.model import FORMAT, Model, add_step, model_of
from horovod_sparse.cli.options import (
    Source,
    add_hosts,
    add_source,
    check_picture,
    count,
    density_or_auto,
    host_network_from,
    network_from,
    num_parameters,
    read_merging,
    read_recipe,
    read_tensor_selection,
    selection_from,
    source_of,
)
from horovod_sparse.cli.plan import report as plan_report
from horovod_sparse.cli.plan.accuracy import OPTIMIZERS, accuracy
from horovod_sparse.cli.plan.verdict import (
    GRADIENT_BYTES,
    Verdict,
    candidates,
    crossing,
    dense_cost,
    residual_bytes,
    sentences,
    verdict_of,
)
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.planning.formulas import assumed_profile, faster_levels
from horovod_sparse.planning.profile import Levels
from horovod_sparse.planning.request import STRATEGIES
from horovod_sparse.planning.selection import densest_plan
from horovod_sparse.planning.timeline import predict
from horovod_sparse.planning.workload import LAYER_TABLES, Workload
from horovod_sparse.plans.dense import bytes_by_round
from horovod_sparse.plans.network import HOST_NETWORK, AlphaBeta
from horovod_sparse.plans.plan import Plan

_MOST_RANKS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add = parser.add_argument
    tables = ", ".join(LAYER_TABLES)
    add("--model", metavar="TABLE|FILE", help=f"{tables}; or a file .json: {FORMAT}")
    add(
        "--params",
        type=num_parameters,
        metavar="N",
        help="instead of it: as in 124M, with --step-ms, for a verdict",
    )
    text = "several times beside several --ranks (default: the best of exdyna and topk at 0.01, 0.001)"
    add("--sparsifier", action="append", metavar="NAME[:ARGUMENT=VALUE,...]", help=text)
    text = "kept fraction, auto (the largest for nothing) or auto(least=0.001,most=0.1)"
    add("--density", type=density_or_auto, help=f"{text} (default: the table's, or the sparsifier's)")
    text = "layerwise, single, omgs, optimal, joint, fixed(num_elements=N), fixed(bytes=N), or a plan's file"
    add("--merging", default="optimal", metavar="STRATEGY", help=f"{text} (default: %(default)s)")
    text = "all (are sparsified), cost (Eq. (1) of DRAGONN) or min_elements(N) (default: all)"
    add("--tensor-selection", metavar="RULE", help=text)
    add_step(parser)
    add_source(parser)
    add("--nodes", type=count, metavar="N", help="hosts of --per-host ranks each, in place of --ranks")
    add_hosts(parser)
    text = "flat, host (gradients are summed within hosts first) or auto (the faster one; default)"
    add("--levels", choices=("flat", "host", "auto"), default="auto", help=text)
    text = "of dense gradients: the best that dense training could do (default: %(default)s)"
    add("--gradient-dtype", choices=tuple(GRADIENT_BYTES), default="float16", help=text)
    add("--optimizer", choices=OPTIMIZERS, help="of the training: for what is said of accuracy")
    add("--framework", choices=("torch", "tensorflow"), help="where the plan shall be used; checked")
    add("--verdict", action="store_true", help="a few lines: whether, how much, and what to paste")
    add("--rows", type=int, default=40, metavar="N", help="of each table (default: %(default)s)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write all numbers to FILE, or to stdout")
    add("--save-plan", metavar="FILE", help="for --merging, or Plan.from_dict and merging= of an optimizer")
    add("--picture", metavar="FILE", help="both queues over time (.png, .svg, .pdf)")
    text = "strategies drawn below it, with commas: layerwise, single, fixed 8192, omgs, optimal, dense"
    add("--beside", default="", metavar="NAMES", help=text)
    add("--timeline", metavar="FILE", help="of HOROVOD_TIMELINE, from rank 0: the measured step is drawn too")


def run(options: argparse.Namespace) -> int:
    """Plans and prints."""
    _check(options)
    model = model_of(options)
    if len(options.ranks or ()) > 1:
        return _sizes(options, model)
    if len(options.sparsifier or ()) > 1:
        raise ArgumentError("--sparsifier", options.sparsifier, "one, or several --ranks beside several")
    source = source_of(options, options.ranks[0] if options.ranks else None)
    console = make_console(to_stderr=options.json == "-")
    for warning in (*source.warnings, *model.doubts(source.measured)):
        show(console, f"warning: {warning}", "yellow")
    brief = options.verdict or options.params is not None
    if brief and (options.save_plan or options.picture):
        given = "--save-plan" if options.save_plan else "--picture"
        raise ArgumentError(
            given, options.save_plan or options.picture, "plan without --verdict and --params"
        )
    chosen = _chosen(options, model, source, _recipe(options, model, source), others=not brief)
    verdict = chosen.verdict
    if brief and source.measured is None:
        verdict = dataclasses.replace(verdict, dense_wins_from=_crossing(options, model, source))
    lines = sentences(
        verdict,
        options.gradient_dtype,
        source,
        paste=verdict.paste(
            _merging(options.merging), options.gradient_dtype, levels=source.profile.per_host > 1
        ),
        told=accuracy(chosen.recipe, options.optimizer),
        origin=model.source.partition(". ")[0].rstrip("."),
        assumed=_assumed(options, source),
    )
    for number, (name, line) in enumerate(lines.items()):
        show(console, f"{name}: {line}", None if number else "bold")
    numbers = _numbers(verdict, source) | {name.replace(" ", "_"): lines[name] for name in _IN_JSON}
    if not brief:
        numbers |= _report(options, model, source, chosen, console)
    _write(options, numbers)
    return 0


#: lines that JSON has, too
_IN_JSON = ("accuracy", "paste", "how sure", "assumed")


def _merging(text: str) -> str:
    """The argument `merging` for what `--merging` was."""
    if text.endswith(".json"):
        return f"Plan.from_dict(json.load(open({text!r})))"
    return f'"{text}"' if text in STRATEGIES else text


def _assumed(options: argparse.Namespace, source: Source) -> list[str]:
    """What nobody has measured."""
    assumed = [*source.assumed, f"dense gradients in {options.gradient_dtype}"]
    if options.update is None and (source.measured is None or not source.measured.training):
        assumed.append("no update (--update)")
    if options.params is not None:
        assumed.append("equal pieces, and a third of the step for forward")
    return assumed


def _numbers(verdict: Verdict, source: Source) -> dict[str, Any]:
    """Of the verdict, for JSON."""
    return {
        "worth_it": verdict.answer,
        "ranks": source.profile.size,
        "from": source.words,
        "recipe": verdict.recipe.describe(),
        "speedup": verdict.speedup,
        "sparse_seconds": verdict.sparse_seconds,
        "dense_seconds": verdict.dense_seconds,
        "computing_seconds": verdict.computing_seconds,
        "memory_bytes": verdict.memory_bytes,
        "dense_wins_from_bits_per_second": verdict.dense_wins_from
        if math.isfinite(verdict.dense_wins_from)
        else None,
    }


def _crossing(options: argparse.Namespace, model: Model, source: Source) -> float:
    """The bandwidth from which on dense wins, by formulas."""
    profile, alpha = source.profile, network_from(options).alpha_seconds

    def at(bandwidth: float) -> Verdict:
        made = assumed_profile(
            AlphaBeta(alpha, 8.0 / bandwidth),
            profile.size,
            selection=selection_from(options),
            per_host=profile.per_host,
            host_network=host_network_from(options),
        )
        faster = dataclasses.replace(source, profile=made)
        return _chosen(options, model, faster, _recipe(options, model, faster), others=False).verdict

    return crossing(at)


@dataclass(frozen=True)
class _Chosen:
    """A plan at one size, and what is predicted of it."""

    recipe: Recipe
    workload: Workload
    plan: Plan
    reasons: dict[str, str]
    cost: CostModel
    levels: Levels
    per_host: int
    words: tuple[str, ...]
    predictions: list[plan_report.Predicted]

    @property
    def verdict(self) -> Verdict:
        """Of the predictions."""
        dense = next(one for one in self.predictions if one.name == "dense")
        computing = self.workload.step_seconds + self.workload.update_seconds
        per_host = self.per_host if self.levels == "host" else 1
        num_elements = sum(parameter.num_elements for parameter in self.workload.sparse)
        memory = residual_bytes(self.recipe, num_elements, per_host)
        return Verdict(self.recipe, dense.seconds, self.predictions[0].seconds, computing, memory)


def _recipe(options: argparse.Namespace, model: Model, source: Source, text: str | None = None) -> Recipe:
    """As asked for; the best of some where nothing is said."""
    text = text or (options.sparsifier[0] if options.sparsifier else None)
    if text is None and options.density is None:
        usable = [
            one for one in candidates(options.optimizer) if one.sparsifier.name in source.profile.selection
        ]
        if len(usable) > 1:
            return verdict_of(model.workload(source.measured, options.update), source.profile, usable).recipe
    text, density = text or "exdyna", options.density
    if density is None and "density=" not in text:
        density = model.density
    return read_recipe(text, density)


def _chosen(
    options: argparse.Namespace, model: Model, source: Source, recipe: Recipe, *, others: bool = True
) -> _Chosen:
    sparsifier, merging = recipe.sparsifier, read_merging(options.merging)
    selection = None if options.tensor_selection is None else read_tensor_selection(options.tensor_selection)
    if isinstance(merging, Plan):
        recipe = recipe.at(merging.density)
    step, why = model.workload(source.measured, options.update), ""
    # what was measured is fused as in a training; formulas are the papers', without
    common: dict[str, Any] = {"fuse_sparse": source.measured is not None}

    def chosen_at(density: float, **changed: Any) -> tuple[Workload, Plan, dict[str, str], CostModel]:
        cost = source.profile.cost(dataclasses.replace(sparsifier, density=density), **{**common, **changed})
        return *plan_report.chosen_plan(step, merging, selection, recipe, cost), cost

    def iteration(levels: Levels) -> float:
        workload, plan, _, cost = chosen_at(recipe.sparsifier.density, levels=levels)
        return predict(workload, plan, cost).iteration_seconds

    profile, told = source.profile, ""
    levels: Levels = "flat"
    if profile.per_host > 1:
        given = source.measured or profile, profile.num_hosts, profile.per_host, "an iteration: "
        choice = faster_levels(iteration, recipe.sparsifier, *given)
        levels = choice.levels if options.levels == "auto" else options.levels
        told = f"levels: {levels} ({choice.reason})"
    elif options.levels == "host":
        allowed = "--per-host 2 or more beside it, or a profile of such hosts"
        raise ArgumentError("--levels", options.levels, allowed)
    common["levels"] = levels

    def seconds(plan: Plan, density: float) -> float:
        cost = profile.cost(dataclasses.replace(sparsifier, density=density), **common)
        return predict(step, plan, cost).iteration_seconds

    if recipe.auto is None or (isinstance(merging, Plan) and merging.density is not None):
        workload, plan, reasons, cost = chosen_at(recipe.sparsifier.density)
    else:
        densest = densest_plan(recipe.auto, lambda density: chosen_at(density)[1], seconds)
        plan, why = densest.plan, densest.reason
        recipe = recipe.at(plan.density)
        workload, _, reasons, cost = chosen_at(densest.density)
        workload = workload.with_dense(plan.dense)
    name = Path(options.merging).name  # of a file, not where it is
    predicted = plan_report.Predicted(name, plan, predict(workload, plan, cost))
    dense = dense_cost(profile, GRADIENT_BYTES[options.gradient_dtype] / 4)
    predictions = plan_report.compared(workload, predicted, cost, dense, others=others)
    if others and profile.per_host > 1:  # the same with the other number of levels
        other = "flat" if levels == "host" else "host"
        beside, plan_beside, _, cost_beside = chosen_at(recipe.sparsifier.density, levels=other)
        timeline = predict(beside, plan_beside, cost_beside)
        predictions.insert(1, plan_report.Predicted(f"{name}, {other}", plan_beside, timeline))
    words = tuple(line for line in (told, why) if line)
    return _Chosen(recipe, workload, plan, reasons, cost, levels, profile.per_host, words, predictions)


def _report(
    options: argparse.Namespace, model: Model, source: Source, chosen: _Chosen, console: Console
) -> dict[str, Any]:
    """Prints tables, writes files, and gives the numbers."""
    predictions, workload, plan = chosen.predictions, chosen.workload, chosen.plan
    rows = plan_report.bucket_rows(workload, predictions[0], chosen.recipe.sparsifier.density)
    show(console, f"{model.name}, {chosen.recipe.sparsifier.describe()}, {predictions[0].name}: {plan}")
    for line in chosen.words:
        show(console, line)
    if rows:
        console.print(plan_report.bucket_table(rows, options.rows))
    if chosen.reasons:
        console.print(plan_report.dense_table(chosen.reasons, workload, options.rows))
    console.print(plan_report.compared_table(predictions))
    if told := plan_report.too_small(predictions):
        show(console, told, "yellow")
    numbers: dict[str, Any] = {
        "buckets": rows,
        "dense": [{"name": name, "reason": reason} for name, reason in chosen.reasons.items()],
        "compared": [
            {
                "name": one.name,
                "buckets": len(one.plan.buckets),
                "dense": len(one.plan.dense),
                "iteration_seconds": one.seconds,
                "visible_seconds": one.timeline.visible_seconds,
            }
            for one in predictions
        ],
    }
    if chosen.recipe.auto is not None or plan.density is not None:
        numbers["density"] = chosen.words[-1] if chosen.words else ""
    if options.save_plan:
        text = json.dumps(plan.to_dict(), indent=1) + "\n"
        Path(options.save_plan).write_text(text, encoding="utf-8")
    if options.picture:
        _draw(options, predictions, console)
    return {"plan": plan.to_dict(), "levels": chosen.levels, **numbers}


def _sizes(options: argparse.Namespace, model: Model) -> int:
    """A table over numbers of ranks for every sparsifier, by what it declares to send."""
    if options.save_plan or options.picture or options.verdict or options.params is not None:
        refused = "one number, for --save-plan, --picture, --verdict and --params"
        raise ArgumentError("--ranks", options.ranks, refused)
    console, studies = make_console(to_stderr=options.json == "-"), []
    share = GRADIENT_BYTES[options.gradient_dtype]
    columns = ("P", "iteration", "dense", "speedup", "bytes per rank", "of dense", "buckets", "levels")
    for text in options.sparsifier or [None]:
        points, title = [], ""
        for size in options.ranks:
            source = source_of(options, size)
            chosen = _chosen(options, model, source, _recipe(options, model, source, text), others=False)
            verdict, title = chosen.verdict, title or source.words.partition(", ")[2]
            points.append(
                {
                    "size": size,
                    "sparsifier": chosen.recipe.describe(),
                    "sparse_seconds": verdict.sparse_seconds,
                    "dense_seconds": verdict.dense_seconds,
                    "speedup": verdict.speedup,
                    "bytes_per_rank": _bytes(chosen, source),
                    "dense_bytes_per_rank": share * sum(one.num_elements for one in model.parameters),
                    "buckets": len(chosen.plan.buckets),
                    "levels": chosen.levels,
                }
            )
        named = sorted({str(point["sparsifier"]) for point in points})
        best = max(points, key=lambda point: point["speedup"])
        first = next((point["size"] for point in points if point["speedup"] <= 1.0), None)
        dense = "wins at none of these" if first is None else f"wins with {first} ranks"
        line = f"worth it: up to {best['speedup']:.1f} times faster, with {best['size']} ranks; dense {dense}"
        show(console, line, "bold")
        caption = "times in ms; bytes that a rank puts in between hosts, as the sparsifier declares them"
        table = plain_table(f"{model.name}, {' or '.join(named)}, {title}", columns, caption)
        for point in points:
            table.add_row(
                f"{point['size']}",
                f"{point['sparse_seconds'] * 1e3:,.1f}",
                f"{point['dense_seconds'] * 1e3:,.1f}",
                f"{point['speedup']:.2f}",
                f"{point['bytes_per_rank']:,.0f}",
                f"{point['dense_bytes_per_rank']:,.0f}",
                f"{point['buckets']}",
                f"{point['levels']}",
                style="" if point["speedup"] > 1.0 else "dim",
            )
        told = accuracy(chosen.recipe, options.optimizer)
        show(console, f"accuracy: {told}")
        console.print(table)
        studies.append({"sparsifier": " or ".join(named), "accuracy": told, "points": points})
    assumed = "; ".join(_assumed(options, source))
    show(console, f"assumed: {assumed}")
    _write(options, {"model": model.name, "merging": options.merging, "assumed": assumed, "studies": studies})
    return 0


def _bytes(chosen: _Chosen, source: Source) -> int:
    """That the busiest rank puts in between hosts."""
    per_host = source.profile.per_host if chosen.levels == "host" else 1
    facts = {parameter.name: parameter for parameter in chosen.workload.parameters}
    total = sum(facts[name].num_bytes for name in chosen.plan.dense)
    for names in chosen.plan.buckets:
        n = max(1, sum(facts[name].num_elements for name in names) // per_host)
        rounds = bytes_by_round(chosen.recipe.sparsifier, source.profile.size // per_host, n)
        total += sum(num_bytes for _, num_bytes in rounds)
    return total


def _check(options: argparse.Namespace) -> None:
    """Refuses what can be refused before anything is computed; hosts become ranks."""
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
    if options.nodes is not None:
        if options.ranks:
            raise ArgumentError("--nodes", options.nodes, "either it or --ranks")
        options.ranks = [options.nodes * (options.per_host or 1)]
        if options.ranks == [1]:
            allowed = "two workers or more: one alone communicates nothing"
            raise ArgumentError("--nodes", options.nodes, allowed)
        if options.nodes == 1 and options.profile is None:  # all there is to communicate by is in the host
            options.bandwidth = options.bandwidth or 8.0 / HOST_NETWORK.beta_seconds
            options.latency = options.latency or HOST_NETWORK.alpha_seconds
            options.per_host = None
    options.ranks = sorted(set(options.ranks or ()))
    if options.ranks and options.ranks[-1] > _MOST_RANKS:
        raise ArgumentError("--ranks", options.ranks[-1], f"{_MOST_RANKS} at most")


def _write(options: argparse.Namespace, numbers: dict[str, Any]) -> None:
    text = json.dumps(numbers, indent=1)
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text + "\n", encoding="utf-8")


def _draw(options: argparse.Namespace, predictions: list[plan_report.Predicted], console: Console) -> None:
    from horovod_sparse.cli.plan.measured import measured_step
    from horovod_sparse.cli.plan.picture import draw_queues, save

    panels = [predictions[0], *(one for one in predictions[1:] if one.name in options.beside)]
    measured = None if options.timeline is None else measured_step(options.timeline, predictions[0].plan)
    save(draw_queues(panels, measured), options.picture)
    show(console, f"{options.picture} written")
    if measured is not None:
        text = f"measured: {measured.seconds * 1e3:.1f} ms from the first message to the end of the last"
        show(console, f"{text}, median of {measured.num_steps} steps")
