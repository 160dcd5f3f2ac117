"""What a plan is worth: its step, bucket by bucket, and the steps of other plans beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from horovod_sparse.cli.console import plain_table
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.planning.optimal import optimal
from horovod_sparse.planning.selection import TensorSelection, dense_of, joint, select_tensors
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


@dataclass(frozen=True)
class Predicted:
    """A plan and the step that it leads to.

    Attributes:
        name: of the strategy.
        plan: it made.
        timeline: of the step.
    """

    name: str
    plan: Plan
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.timeline.iteration_seconds


def chosen_plan(
    workload: Workload,
    merging: Strategy | Plan,
    selection: TensorSelection | None,
    recipe: Recipe,
    cost: CostModel,
) -> tuple[Workload, Plan, dict[str, str]]:
    """What stays dense, by rule and by selection, and how the rest is merged."""
    if selection is not None and (isinstance(merging, Plan) or merging is joint):
        what = "a plan" if isinstance(merging, Plan) else "joint"
        raise ArgumentError("--tensor-selection", selection, f"only one of them: {what} decides this, too")
    reasons: dict[str, str] = {}
    if isinstance(merging, Plan):
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
    if merging is joint:
        reasons = {**_joint_reasons(step, plan, cost), **reasons}
    step = step.with_dense(plan.dense)
    return step, plan, {name: reasons.get(name, "the plan says so") for name in step.dense_names}


def _joint_reasons(workload: Workload, plan: Plan, cost: CostModel) -> dict[str, str]:
    best = predict(workload, plan, cost).iteration_seconds * 1e3
    sparse = predict(workload, optimal(workload, cost), cost).iteration_seconds * 1e3
    why = f"joint: the step takes {best:.1f} ms, {sparse:.1f} ms with nothing more dense"
    return dict.fromkeys(plan.dense, why)


def too_small(predictions: Sequence[Predicted]) -> str:
    """What to say where the model is too small, or the network too fast; empty where sparsifying wins."""
    chosen, dense = predictions[0], next(one for one in predictions if one.name == "dense")
    sparse_ms, dense_ms = (1e3 * one.seconds for one in (chosen, dense))
    if not chosen.plan.buckets or sparse_ms < dense_ms:
        return ""
    return (
        f"too small a model, or too fast a network: {sparse_ms:.2f} ms with this plan, {dense_ms:.2f} ms "
        "dense. Train densely, or --tensor-selection cost"
    )


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


def compared(
    workload: Workload,
    chosen: Predicted,
    cost: CostModel,
    dense_cost: CostModel | None = None,
    *,
    others: bool = True,
) -> list[Predicted]:
    """The chosen plan first, then what the simple strategies, the others, and all dense lead to."""
    beside = []
    for name, strategy in STRATEGIES.items() if others else ():
        if name != chosen.name:
            plan = strategy(workload, cost)
            beside.append(Predicted(name, plan, predict(workload, plan, cost)))
    every = workload.with_dense([parameter.name for parameter in workload.parameters])
    plan = Plan((), every.dense_names)
    beside.append(Predicted("dense", plan, predict(every, plan, dense_cost or cost)))
    return [chosen, *beside]


def bucket_table(rows: Sequence[Mapping[str, Any]], at_most: int) -> Table:
    """One row per bucket, the first ones of many; parameters by their first, their last and their number."""
    left = len(rows) - at_most
    table = plain_table(
        "",
        ("bucket", "parameters", "elements", "k", "ready", "select", "waits", "sends at", "takes", "done"),
        f"times in ms{f'; {left} more buckets (--rows {len(rows)})' if left > 0 else ''}",
    )
    for row in rows[:at_most]:
        first, *others = row["names"]
        table.add_row(
            str(row["number"]),
            f"{first} … {others[-1]} ({1 + len(others)})" if others else first,
            f"{row['num_elements']:,}",
            f"{row['num_selected']:,}",
            *(_ms(value) for name, value in row.items() if name.endswith("_seconds")),
        )
    return table


def dense_table(reasons: Mapping[str, str], workload: Workload, at_most: int) -> Table:
    """What stays dense, and why."""
    left = len(reasons) - at_most
    title = f"{len(reasons)} parameter{' stays' if len(reasons) == 1 else 's stay'} dense"
    caption = f"{left} more (--rows {len(reasons)})" if left > 0 else ""
    table = plain_table(title, ("parameter", "elements", "why"), caption)
    sizes = {parameter.name: parameter.num_elements for parameter in workload.parameters}
    for name, reason in list(reasons.items())[:at_most]:
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


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.{1 if seconds >= 0.01 else 2}f}"
