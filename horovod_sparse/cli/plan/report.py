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
from horovod_sparse.planning.greedy import omgs
from horovod_sparse.planning.optimal import optimal
from horovod_sparse.planning.selection import Choice, TensorSelection, dense_of, joint, select_tensors
from horovod_sparse.planning.strategies import Strategy, fixed, layerwise, single
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


@dataclass(frozen=True)
class BucketRow:
    """A bucket of a plan, as its table shows it.

    Attributes:
        number: from 0, in backward order.
        names: of its parameters, in backward order.
        num_elements: n.
        num_selected: k, of a rank or of the union as the sparsifier counts.
        ready_seconds: when its last gradient is there.
        selection_seconds: how long selecting takes.
        send_seconds: when its messages get the network.
        communication_seconds: how long they take, decoding included; with others, where they are fused.
        done_seconds: when they end.
    """

    number: int
    names: tuple[str, ...]
    num_elements: int
    num_selected: int
    ready_seconds: float
    selection_seconds: float
    send_seconds: float
    communication_seconds: float
    done_seconds: float

    @property
    def waiting_seconds(self) -> float:
        """That its messages wait for the network."""
        return max(0.0, self.send_seconds - self.ready_seconds - self.selection_seconds)


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
        reasons = dict.fromkeys(merging.dense, "the given plan says so")
        return workload.with_dense(merging.dense), merging, reasons
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
    return step.with_dense(plan.dense), plan, reasons


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


def dense_reasons(reasons: Mapping[str, str], workload: Workload) -> list[Choice]:
    """Dense parameters in backward order with their reasons."""
    names = workload.dense_names
    return [Choice(name, True, reasons.get(name, "the plan says so")) for name in names]


def bucket_rows(workload: Workload, predicted: Predicted, density: float) -> list[BucketRow]:
    """The table's rows, in the plan's order."""
    sizes = {parameter.name: parameter.num_elements for parameter in workload.parameters}
    rows = []
    for number, names in enumerate(predicted.plan.buckets):
        spans = predicted.timeline.bucket_spans(number)
        selection, sending = spans["selection"], spans["sparse"]
        total = sum(sizes[name] for name in names)
        rows.append(
            BucketRow(
                number,
                names,
                total,
                min(total, max(1, round(density * total))),
                selection.start,
                selection.end - selection.start,
                sending.start,
                sending.end - sending.start,
                sending.end,
            )
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


def as_json(
    rows: Sequence[BucketRow], dense: Sequence[Choice], predictions: Sequence[Predicted]
) -> dict[str, Any]:
    """Everything that the tables show, in plain values."""
    return {
        "buckets": [
            {
                "number": row.number,
                "names": list(row.names),
                "num_elements": row.num_elements,
                "num_selected": row.num_selected,
                "ready_seconds": row.ready_seconds,
                "selection_seconds": row.selection_seconds,
                "waiting_seconds": row.waiting_seconds,
                "send_seconds": row.send_seconds,
                "communication_seconds": row.communication_seconds,
                "done_seconds": row.done_seconds,
            }
            for row in rows
        ],
        "dense": [{"name": choice.name, "reason": choice.reason} for choice in dense],
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


def few_names(names: Sequence[str]) -> str:
    """First and last of some parameters, and how many there are.

    Example:
        >>> few_names(["fc.bias", "fc.weight", "conv.weight"])
        'fc.bias … conv.weight (3)'
    """
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def bucket_table(rows: Sequence[BucketRow], at_most: int) -> Table:
    """One row per bucket, the first ones of many."""
    left = len(rows) - at_most
    table = plain_table(
        "",
        ("bucket", "parameters", "elements", "k", "ready", "select", "waits", "sends at", "takes", "done"),
        f"times in ms{f'; {left} more buckets (--rows {len(rows)})' if left > 0 else ''}",
    )
    for row in rows[:at_most]:
        computing = (row.ready_seconds, row.selection_seconds)
        sending = (row.waiting_seconds, row.send_seconds, row.communication_seconds, row.done_seconds)
        table.add_row(
            str(row.number),
            few_names(row.names),
            f"{row.num_elements:,}",
            f"{row.num_selected:,}",
            *(_ms(seconds) for seconds in (*computing, *sending)),
        )
    return table


def dense_table(dense: Sequence[Choice], sizes: dict[str, int], at_most: int) -> Table:
    """What stays dense, and why."""
    count = f"{len(dense)} parameter{' stays' if len(dense) == 1 else 's stay'} dense"
    left = len(dense) - at_most
    caption = f"{left} more (--rows {len(dense)})" if left > 0 else ""
    table = plain_table(count, ("parameter", "elements", "why"), caption)
    for choice in dense[:at_most]:
        table.add_row(choice.name, f"{sizes[choice.name]:,}", choice.reason)
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
