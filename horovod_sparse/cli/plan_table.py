"""A plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from horovod_sparse.cli.main_console import plain_table
from horovod_sparse.cli.plan_report import BucketRow, Predicted
from horovod_sparse.merging import Choice

__all__ = ["bucket_table", "compared_table", "dense_table", "few_names"]


def few_names(names: Sequence[str]) -> str:
    """First and last of some parameters, and how many there are.

    Example:
        >>> few_names(["fc.bias", "fc.weight", "conv.weight"])
        'fc.bias … conv.weight (3)'
    """
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def bucket_table(rows: Sequence[BucketRow], at_most: int) -> Table:
    """One row per bucket, the first ones of many.

    Args:
        rows: of `bucket_rows`.
        at_most: rows that are shown.
    """
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
    """What stays dense, and why.

    Args:
        dense: of `dense_reasons`.
        sizes: elements by name.
        at_most: rows that are shown.
    """
    count = f"{len(dense)} parameter{' stays' if len(dense) == 1 else 's stay'} dense"
    left = len(dense) - at_most
    caption = f"{left} more (--rows {len(dense)})" if left > 0 else ""
    table = plain_table(count, ("parameter", "elements", "why"), caption)
    for choice in dense[:at_most]:
        table.add_row(choice.name, f"{sizes[choice.name]:,}", choice.reason)
    return table


def compared_table(predictions: Sequence[Predicted]) -> Table:
    """Predicted iterations; the chosen plan first.

    Args:
        predictions: of `compared`.
    """
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
