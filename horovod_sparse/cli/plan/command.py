"""`horovod-sparse plan`: whether it is worth it, buckets, what stays dense and why, at one size or many."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from horovod_sparse.cli.console import console as make_console
from horovod_sparse.cli.console import plain_table, show
from horovod_sparse.cli.model import FORMAT, Model, add_step, model_of
from horovod_sparse.cli.options import (
    Source,
    add_source,
    density,
    density_or_auto,
    host_network_from,
    network_from,
    num_parameters,
    read_merging,
    read_recipe,
    read_tensor_selection,
    source_of,
)
from horovod_sparse.cli.plan import report
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe, parse_recipe
from horovod_sparse.planning.advice import (
    GRADIENT_BYTES,
    OPTIMIZERS,
    Verdict,
    accuracy,
    candidates,
    crossing,
    fitting_rounds,
    verdict_of,
)
from horovod_sparse.planning.formulas import assumed_profile
from horovod_sparse.planning.request import STRATEGIES
from horovod_sparse.planning.workload import LAYER_TABLES
from horovod_sparse.plans.dense import bytes_by_round
from horovod_sparse.plans.network import HOST_NETWORK, AlphaBeta
from horovod_sparse.training.settings import AUTO_SHARE

_MOST_RANKS = 4096
#: lines that JSON has, too
_IN_JSON = ("accuracy", "paste", "how sure", "assumed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    tables = ", ".join(LAYER_TABLES)
    add("--model", metavar="TABLE|FILE", help=f"{tables}; or a file .json: {FORMAT}")
    text = "instead of it: as in 124M, with --step-ms, for a verdict"
    add("--params", type=num_parameters, metavar="N", help=text)
    text = "several times beside several --ranks (default: the best of exdyna and topk at 0.01, 0.001)"
    add("--sparsifier", action="append", metavar="NAME[:ARGUMENT=VALUE,...]", help=text)
    text = "kept fraction, auto (the largest for nothing) or auto(least=0.001,most=0.1)"
    add("--density", type=density_or_auto, help=f"{text} (default: the table's, or the sparsifier's)")
    text = "of an iteration that the network may take, as 0.05: dense, or the largest density that fits"
    add("--network-share", type=density, metavar="SHARE", help=text)
    text = "layerwise, single, omgs, optimal, fixed(num_elements=N), fixed(bytes=N), or a plan's file"
    add("--merging", default="optimal", metavar="STRATEGY", help=f"{text} (default: %(default)s)")
    text = "all (are sparsified), cost (Eq. (1) of DRAGONN) or min_elements(N) (default: all)"
    add("--tensor-selection", metavar="RULE", help=text)
    add_step(parser)
    add_source(parser)
    text = "flat, host (gradients are summed within hosts first) or auto (the faster one; default)"
    add("--levels", choices=("flat", "host", "auto"), default="auto", help=text)
    text = "of dense gradients: the best that dense training could do (default: %(default)s)"
    add("--gradient-dtype", choices=tuple(GRADIENT_BYTES), default="float16", help=text)
    add("--optimizer", choices=OPTIMIZERS, help="of the training: for what is said of accuracy")
    add("--verdict", action="store_true", help="a few lines: whether, how much, and what to paste")
    add("--json", nargs="?", const="-", metavar="FILE", help="write all numbers to FILE, or to stdout")
    add("--save-plan", metavar="FILE", help="for --merging, or Plan.from_dict and merging= of an optimizer")


def run(options: argparse.Namespace) -> int:
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
    if brief and options.save_plan:
        raise ArgumentError("--save-plan", options.save_plan, "plan without --verdict and --params")
    chosen = _chosen(options, model, source, others=not brief)
    verdict, border = chosen.verdict, None
    if brief and source.measured is None and options.network_share is None:
        border = _crossing(options, model, source)
    merging = f'"{options.merging}"' if options.merging in STRATEGIES else options.merging
    if options.merging.endswith(".json"):
        merging = f"Plan.from_dict(json.load(open({options.merging!r})))"
    origin = model.source.partition(". ")[0].rstrip(".")
    asked = options.gradient_dtype, merging, options.network_share
    times = report.sentences(verdict, source, asked, border)
    lines = {
        "worth it": times.pop("worth it"),
        "accuracy": accuracy(chosen.recipe, options.optimizer),
        **times,
        "local steps": str(fitting_rounds(chosen.rounds, options.network_share or AUTO_SHARE)),
        "how sure": f"{report.how_sure(source, options.gradient_dtype)}; time of the step: {origin}",
        "assumed": "; ".join(_assumed(options, source)),
    }
    for number, (name, line) in enumerate(lines.items()):
        show(console, f"{name}: {line}", None if number else "bold")
    numbers: dict[str, Any] = {
        "worth_it": verdict.answer,
        "ranks": source.profile.size,
        "from": source.words,
        "recipe": verdict.recipe.describe(),
        "speedup": verdict.speedup,
        "sparse_seconds": verdict.sparse_seconds,
        "dense_seconds": verdict.dense_seconds,
        "computing_seconds": verdict.computing_seconds,
        "memory_bytes": verdict.memory_bytes,
        "dense_wins_from_bits_per_second": None if border is None or math.isinf(border) else border,
        **{name.replace(" ", "_"): lines[name] for name in _IN_JSON},
    }
    for line in chosen.words if brief and options.network_share is not None else ():
        show(console, line)
    if not brief:
        numbers |= _report(options, model, chosen, console)
    _write(options, numbers)
    return 0


def _assumed(options: argparse.Namespace, source: Source) -> list[str]:
    """What nobody has measured."""
    assumed = [*source.assumed, f"dense gradients in {options.gradient_dtype}"]
    if options.update is None and (source.measured is None or not source.measured.training):
        assumed.append("no update (--update)")
    if options.params is not None:
        assumed.append("equal pieces, and a third of the step for forward")
    return assumed


def _crossing(options: argparse.Namespace, model: Model, source: Source) -> float:
    """The bandwidth from which on dense wins, by formulas."""
    profile, alpha = source.profile, network_from(options).alpha_seconds

    def at(bandwidth: float) -> Verdict:
        made = assumed_profile(
            AlphaBeta(alpha, 8.0 / bandwidth),
            profile.size,
            per_host=profile.per_host,
            host_network=host_network_from(options),
        )
        return _chosen(options, model, dataclasses.replace(source, profile=made), others=False).verdict

    return crossing(at)


def _chosen(
    options: argparse.Namespace, model: Model, source: Source, text: str | None = None, *, others: bool
) -> report.Chosen:
    """Of the sparsifier that is asked for, or of the best of some where nothing is said."""
    step = model.workload(source.measured, options.update)
    text = text or (options.sparsifier[0] if options.sparsifier else None)
    recipe: Recipe | None = None
    if text is None and options.density is None and options.network_share is not None:
        recipe = parse_recipe("best:density=auto")
    elif text is None and options.density is None:
        known = source.profile.selection
        usable = [one for one in candidates(options.optimizer) if one.sparsifier.name in known]
        if len(usable) > 1:
            recipe = verdict_of(step, source.profile, usable).recipe
    if recipe is None:
        text, asked_density = text or "exdyna", options.density
        if "density=" in text:
            if asked_density is not None:
                raise ArgumentError("--density", asked_density, f"either it or --sparsifier {text}")
        elif asked_density is None:
            asked_density = model.density
        recipe = read_recipe(text, asked_density)
    rule = options.tensor_selection
    asked = report.Asked(
        Path(options.merging).name,  # of a file, not where it is
        read_merging(options.merging),
        None if rule is None else read_tensor_selection(rule),
        options.levels,
        options.gradient_dtype,
        options.network_share,
    )
    return report.choose(step, source, recipe, asked, others=others)


def _report(
    options: argparse.Namespace, model: Model, chosen: report.Chosen, console: Console
) -> dict[str, Any]:
    """Prints tables, writes files, and gives the numbers."""
    predictions, workload, plan = chosen.predictions, chosen.workload, chosen.plan
    rows = report.bucket_rows(workload, predictions[0], chosen.recipe.sparsifier.density)
    show(console, f"{model.name}, {chosen.recipe.sparsifier.describe()}, {predictions[0].name}: {plan}")
    for line in chosen.words:
        show(console, line)
    if rows:
        console.print(report.bucket_table(rows))
    if chosen.reasons:
        console.print(report.dense_table(chosen.reasons, workload))
    console.print(report.compared_table(predictions))
    console.print(report.rounds_table(chosen.rounds))
    if options.save_plan:
        Path(options.save_plan).write_text(json.dumps(plan.to_dict(), indent=1) + "\n", encoding="utf-8")
    numbers: dict[str, Any] = {
        "plan": plan.to_dict(),
        "local_steps": [one._asdict() for one in chosen.rounds],
        "levels": chosen.levels,
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
    return numbers


def _sizes(options: argparse.Namespace, model: Model) -> int:
    """A table over numbers of ranks for every sparsifier, by what it declares to send."""
    if options.save_plan or options.verdict or options.params is not None:
        refused = "one number, for --save-plan, --verdict and --params"
        raise ArgumentError("--ranks", options.ranks, refused)
    console, studies = make_console(to_stderr=options.json == "-"), []
    num_elements = sum(one.num_elements for one in model.parameters)
    columns = ("P", "iteration", "dense", "speedup", "bytes per rank", "of dense", "buckets", "levels")
    for text in options.sparsifier or [None]:
        points: list[dict[str, Any]] = []
        title = ""
        for size in options.ranks:
            source = source_of(options, size)
            chosen = _chosen(options, model, source, text, others=False)
            verdict, title = chosen.verdict, title or source.words.partition(", ")[2]
            points.append(
                {
                    "size": size,
                    "sparsifier": chosen.recipe.describe(),
                    "sparse_seconds": verdict.sparse_seconds,
                    "dense_seconds": verdict.dense_seconds,
                    "speedup": verdict.speedup,
                    "bytes_per_rank": _bytes(chosen, source),
                    "dense_bytes_per_rank": GRADIENT_BYTES[options.gradient_dtype] * num_elements,
                    "buckets": len(chosen.plan.buckets),
                    "levels": chosen.levels,
                }
            )
        named = sorted({point["sparsifier"] for point in points})
        best = max(points, key=lambda point: float(point["speedup"]))
        first = next((point["size"] for point in points if point["speedup"] <= 1.0), None)
        dense = "wins at none of these" if first is None else f"wins with {first} ranks"
        line = f"worth it: up to {best['speedup']:.1f} times faster, with {best['size']} ranks; dense {dense}"
        show(console, line, "bold")
        caption = "times in ms; bytes that a rank puts in between hosts, as the sparsifier declares them"
        table = plain_table(f"{model.name}, {' or '.join(named)}, {title}", columns, caption)
        for point in points:
            times = (f"{1e3 * point[name]:,.1f}" for name in ("sparse_seconds", "dense_seconds"))
            sent = (f"{point[name]:,.0f}" for name in ("bytes_per_rank", "dense_bytes_per_rank"))
            cells = (str(point["size"]), *times, f"{point['speedup']:.2f}", *sent)
            style = "" if point["speedup"] > 1.0 else "dim"
            table.add_row(*cells, str(point["buckets"]), point["levels"], style=style)
        told = accuracy(chosen.recipe, options.optimizer)
        show(console, f"accuracy: {told}")
        console.print(table)
        studies.append({"sparsifier": " or ".join(named), "accuracy": told, "points": points})
    assumed = "; ".join(_assumed(options, source))
    show(console, f"assumed: {assumed}")
    _write(options, {"model": model.name, "merging": options.merging, "assumed": assumed, "studies": studies})
    return 0


def _bytes(chosen: report.Chosen, source: Source) -> int:
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
