"""What a plan is worth: its step, bucket by bucket, the steps of other plans beside it, and all in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from horovod_sparse.cli.console import plain_table
from horovod_sparse.cli.options import Source
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning.advice import (
    GRADIENT_BYTES,
    LOCAL,
    LocalRounds,
    Verdict,
    by_share,
    dense_cost,
    dense_step,
    local_rounds,
    residual_bytes,
)
from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.planning.formulas import faster_levels
from horovod_sparse.planning.optimal import optimal
from horovod_sparse.planning.profile import Levels
from horovod_sparse.planning.selection import TensorSelection, dense_of, densest_plan, select_tensors
from horovod_sparse.planning.strategies import Strategy, fixed, layerwise, omgs, single
from horovod_sparse.planning.timeline import Timeline, predict
from horovod_sparse.planning.workload import Workload
from horovod_sparse.plans.plan import Plan

#: what a plan is compared with; "dense" is beside them
STRATEGIES: dict[str, Strategy] = {
    "layerwise": layerwise,
    "single": single,
    "fixed 8192": fixed(num_elements=8192),
    "omgs": omgs,
    "optimal": optimal,
}

#: of a table; JSON has all
_MOST_ROWS = 40


@dataclass(frozen=True)
class Predicted:
    """A strategy's name, the plan that it made, and the step that this leads to."""

    name: str
    plan: Plan
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.timeline.iteration_seconds


@dataclass(frozen=True)
class Asked:
    """What the command line says of a plan, its name in tables first; `dtype` is that of dense gradients."""

    name: str
    merging: Strategy | Plan
    selection: TensorSelection | None
    level_choice: str
    dtype: str
    share: float | None = None


@dataclass(frozen=True)
class Chosen:
    """A plan at one size, and what is predicted of it: the chosen one first, then others, dense last."""

    recipe: Recipe
    workload: Workload
    reasons: dict[str, str]
    levels: Levels
    per_host: int
    words: tuple[str, ...]
    predictions: list[Predicted]
    rounds: list[LocalRounds]

    @property
    def plan(self) -> Plan:
        return self.predictions[0].plan

    @property
    def verdict(self) -> Verdict:
        sparse, dense = (self.predictions[place].seconds for place in (0, -1))
        computing = self.workload.step_seconds + self.workload.update_seconds
        per_host = self.per_host if self.levels == "host" else 1
        num_elements = sum(parameter.num_elements for parameter in self.workload.sparse)
        memory = residual_bytes(self.recipe, num_elements, per_host)
        return Verdict(self.recipe, dense, sparse, computing, memory)


def choose(step: Workload, source: Source, recipe: Recipe, asked: Asked, *, others: bool = True) -> Chosen:
    """The plan that is asked for, at the density and with the levels that are best."""
    profile, merging, sparsifier = source.profile, asked.merging, recipe.sparsifier
    levels: Levels = "flat"

    def cost_at(density: float, values: str | None = None) -> CostModel:
        # what was measured is fused as in a training; formulas are the papers', without
        chosen = sparsifier.sent_as(density, values)
        return profile.cost(chosen, levels=levels, fuse_sparse=source.measured is not None)

    def chosen_at(density: float, values: str | None = None) -> tuple[Workload, Plan, dict[str, str]]:
        return chosen_plan(step, merging, asked.selection, recipe, cost_at(density, values))

    def plan_at(density: float, values: str | None = None) -> Plan:
        return dataclasses.replace(chosen_at(density, values)[1], values=values)

    def predicted_at(density: float, name: str) -> tuple[Workload, dict[str, str], Predicted]:
        workload, plan, reasons = chosen_at(density)
        return workload, reasons, Predicted(name, plan, predict(workload, plan, cost_at(density)))

    def iteration(tried: Levels) -> float:
        nonlocal levels
        levels = tried
        return predicted_at(recipe.sparsifier.density, "")[2].seconds

    if isinstance(merging, Plan):
        recipe = recipe.at(merging.density)
    words = []
    if profile.per_host > 1:
        given = source.measured or profile, profile.num_hosts, profile.per_host, "an iteration: "
        choice = faster_levels(iteration, recipe.sparsifier, *given)
        levels = choice.levels
        if asked.level_choice in ("flat", "host"):
            levels = "host" if asked.level_choice == "host" else "flat"
        words.append(f"levels: {levels} ({choice.reason})")
    elif asked.level_choice == "host":
        allowed = "--per-host 2 or more beside it, or a profile of such hosts"
        raise ArgumentError("--levels", asked.level_choice, allowed)

    def step_of(plan: Plan, density: float) -> Timeline:
        return predict(step, plan, cost_at(density, plan.values if plan.buckets else None))

    rounds, found = local_rounds(profile, sparsifier, step), None
    if asked.share is not None:
        share, remedy = by_share(asked.share, recipe, profile, step, plan_at, step_of)
        words += [f"network_share={asked.share:g}: {share.words}", share.times]
        words += [f"this fits: {remedy}"] if remedy else []
        found = share.plan, share.density if share.plan.buckets else recipe.sparsifier.density
    elif recipe.auto is not None and not (isinstance(merging, Plan) and merging.density is not None):
        densest = densest_plan(recipe.auto, plan_at, lambda *at: step_of(*at).iteration_seconds)
        words.append(densest.reason)
        found = densest.plan, densest.density
    if found is None:
        workload, reasons, first = predicted_at(recipe.sparsifier.density, asked.name)
    else:
        plan, density = found
        at = density, plan.values if plan.buckets else None
        workload, _, reasons = chosen_at(*at)
        workload, recipe = workload.with_dense(plan.dense), recipe.at(plan.density)
        first = Predicted(asked.name, plan, predict(workload, plan, cost_at(*at)))
    cost, predictions, mine = cost_at(recipe.sparsifier.density), [first], levels
    if others and profile.per_host > 1:  # the same with the other number of levels
        levels = "flat" if levels == "host" else "host"
        predictions.append(predicted_at(recipe.sparsifier.density, f"{asked.name}, {levels}")[2])
    for name, strategy in STRATEGIES.items() if others else ():
        if name != first.name:
            plan = strategy(workload, cost)
            predictions.append(Predicted(name, plan, predict(workload, plan, cost)))
    dense = dense_cost(profile, GRADIENT_BYTES[asked.dtype] / 4)
    plan, _ = dense_step(workload, dense)
    predictions.append(Predicted("dense", plan, predict(workload.with_dense(plan.dense), plan, dense)))
    return Chosen(recipe, workload, reasons, mine, profile.per_host, tuple(words), predictions, rounds)


def chosen_plan(
    workload: Workload,
    merging: Strategy | Plan,
    selection: TensorSelection | None,
    recipe: Recipe,
    cost: CostModel,
) -> tuple[Workload, Plan, dict[str, str]]:
    """What stays dense, by rule and by selection, and how the rest is merged."""
    reasons: dict[str, str] = {}
    if isinstance(merging, Plan):
        if selection is not None:
            raise ArgumentError("--tensor-selection", selection, "only one of them: a plan decides this, too")
        merging.check(workload.parameters)
        step = workload.with_dense(merging.dense)
        return step, merging, dict.fromkeys(step.dense_names, "the given plan says so")
    for parameter in workload.parameters:
        if recipe.rules.density_of(parameter.name, parameter.num_elements) == 1.0:
            reasons[parameter.name] = "a rule of the sparsifier says so"
    choices = select_tensors("all" if selection is None else selection, workload.parameters, cost)
    for choice in choices:
        if choice.dense:
            reasons.setdefault(choice.name, choice.reason)
    step = workload.with_dense(dense_of(choices) | set(reasons))
    plan = merging(step, cost)
    step = step.with_dense(plan.dense)
    return step, plan, {name: reasons.get(name, "the plan says so") for name in step.dense_names}


def bucket_rows(workload: Workload, predicted: Predicted, density: float) -> list[dict[str, Any]]:
    """Of every bucket, in the plan's order: what is in it, and when what happens, in seconds of the step."""
    sizes = {parameter.name: parameter.num_elements for parameter in workload.parameters}
    rows = []
    for number, names in enumerate(predicted.plan.buckets):
        spans = predicted.timeline.bucket_spans(number)
        selection, sending = spans["selection"], spans["sparse"]
        total = sum(sizes[name] for name in names)
        rows.append(
            {
                "number": number,
                "names": list(names),
                "num_elements": total,
                "num_selected": min(total, max(1, round(density * total))),
                "ready_seconds": selection.start,
                "selection_seconds": selection.end - selection.start,
                "waiting_seconds": max(0.0, sending.start - selection.end),
                "send_seconds": sending.start,
                "communication_seconds": sending.end - sending.start,
                "done_seconds": sending.end,
            }
        )
    return rows


def bucket_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row per bucket, the first ones of many; parameters by their first, their last and their number."""
    left = len(rows) - _MOST_ROWS
    table = plain_table(
        "",
        ("bucket", "parameters", "elements", "k", "ready", "select", "waits", "sends at", "takes", "done"),
        f"times in ms{f'; {left} more buckets (all: --json)' if left > 0 else ''}",
    )
    for row in rows[:_MOST_ROWS]:
        first, *others = row["names"]
        table.add_row(
            str(row["number"]),
            f"{first} … {others[-1]} ({1 + len(others)})" if others else first,
            f"{row['num_elements']:,}",
            f"{row['num_selected']:,}",
            *(_ms(value) for name, value in row.items() if name.endswith("_seconds")),
        )
    return table


def dense_table(reasons: Mapping[str, str], workload: Workload) -> Table:
    """What stays dense, and why."""
    left = len(reasons) - _MOST_ROWS
    title = f"{len(reasons)} parameter{' stays' if len(reasons) == 1 else 's stay'} dense"
    caption = f"{left} more (all: --json)" if left > 0 else ""
    table = plain_table(title, ("parameter", "elements", "why"), caption)
    sizes = {parameter.name: parameter.num_elements for parameter in workload.parameters}
    for name, reason in list(reasons.items())[:_MOST_ROWS]:
        table.add_row(name, f"{sizes[name]:,}", reason)
    return table


def compared_table(predictions: Sequence[Predicted]) -> Table:
    """Predicted iterations; the chosen plan first."""
    chosen = predictions[0].seconds
    table = plain_table(
        "Predicted iterations",
        ("strategy", "buckets", "dense", "iteration", "communication seen", ""),
        "times in ms; seen: what is left when computation has ended",
    )
    for number, one in enumerate(predictions):
        table.add_row(
            one.name,
            str(len(one.plan.buckets)),
            str(len(one.plan.dense)),
            _ms(one.seconds),
            _ms(one.timeline.visible_seconds),
            "chosen" if number == 0 else f"x {one.seconds / chosen:.2f}",
            style="bold" if number == 0 else "",
        )
    return table


def rounds_table(rounds: Sequence[LocalRounds]) -> Table:
    """Local steps beside steps that are synchronized each."""
    columns = "after steps", "bytes", "of dense", "takes", "computing", "accuracy"
    caption = "times in ms; computing: of the time, as predicted"
    table = plain_table(f'Exchanges of LocalSteps(compression="{LOCAL}")', columns, caption)
    for one in rounds:
        sent = f"{one.num_bytes:,}", f"1/{one.dense_bytes / one.num_bytes:.0f}", _ms(one.exchange_seconds)
        table.add_row(str(one.every), *sent, f"{1 - one.share:.1%}", one.accuracy)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.{1 if seconds >= 0.01 else 2}f}"


def sentences(
    verdict: Verdict, source: Source, asked: tuple[str, str, float | None], dense_wins_from: float | None
) -> dict[str, str]:
    """What is said of times, line by line; `dense_wins_from` in bit/s where somebody has looked.

    `asked` is the type of dense gradients, the argument `merging`, and the network's share.
    """
    dtype, merging, share = asked
    sparse, dense, alone = (
        f"{1e3 * seconds:,.1f} ms"
        for seconds in (verdict.sparse_seconds, verdict.dense_seconds, verdict.computing_seconds)
    )
    faster = "no gain to speak of" if verdict.answer != "yes" else f"{verdict.speedup:.1f} times faster"
    paste = f'compression="{verdict.recipe.describe()}", merging={merging}'
    if share is not None:
        paste += f", network_share={share:g}"
    if source.profile.per_host > 1:  # summing within a host first may pay
        paste += ', levels="auto"'
    if not verdict.speedup > 1.0 and share is None:
        halves = "compression=hvd.Compression.fp16"
        paste = halves if dtype == "float16" else f"nothing: train dense, in {dtype}"
    lines = {
        "worth it": f"{verdict.answer}, {faster} ({source.words})",
        "iteration": f"{sparse} sparse, {dense} dense ({dtype}, overlapped, fused), {alone} computing alone",
        "memory": f"{verdict.memory_bytes / 1e6:,.0f} MB more on every rank: residual and feedback",
        "paste": paste,
    }
    if dense_wins_from == math.inf:
        lines["dense wins"] = "on no network that was looked at, up to 10 Tbit/s"
    elif dense_wins_from == 0.0:
        lines["dense wins"] = "everywhere: the model is small for its step, or selection is slow"
    elif dense_wins_from is not None:
        lines["dense wins"] = f"from {dense_wins_from / 1e9:.3g} Gbit/s on"
    return lines


def how_sure(source: Source, dtype: str) -> str:
    """What the times are worth, in words."""
    if source.measured is None:
        return "by formulas: horovod-sparse calibrate measures times, for --profile"
    if source.measured.size != source.profile.size:
        return f"measured with {source.measured.size} ranks, and converted by formulas"
    tried = "of 16 such predictions 15 were within 15 % (docs/performance.md)"
    if dtype != "float32":
        tried += f"; what {dtype} saves of a dense allreduce is a formula's"
    return f"times are measured on this cluster: {tried}"
