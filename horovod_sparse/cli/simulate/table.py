"""Simulated steps as tables, and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from horovod_sparse.cli.console import plain_table, show
from horovod_sparse.cli.simulate.study import Crossing, Question, Study, crossing_words


def print_studies(
    console: Console, model: str, merging: str, question: Question, studies: Sequence[Study]
) -> None:
    """A table over P for every sparsifier, and one of crossings.

    Args:
        console: where to.
        model: its name.
        merging: as it was asked for.
        question: what was simulated.
        studies: of `study_of`.
    """
    network = question.network
    where = f"{8e-9 / network.beta_seconds:.4g} Gbit/s, {network.alpha_seconds * 1e6:.4g} us latency"
    show(console, f"{model}, merging {merging}, {where}; the batch of a rank stays the same", "bold")
    columns = ("P", "iteration ms", "dense ms", "speedup", "bytes per rank", "dense", "union", "buckets")
    for study in studies:
        table = plain_table(study.recipe.describe(), columns, "bytes that a rank puts in, each counted once")
        for point in study.points:
            table.add_row(
                f"{point.size}",
                f"{point.sparse_seconds * 1e3:,.1f}",
                f"{point.dense_seconds * 1e3:,.1f}",
                f"{point.speedup:.2f}",
                f"{point.bytes_per_rank:,.0f}",
                f"{point.dense_bytes_per_rank:,.0f}",
                f"{point.union_density:.4f}",
                f"{len(point.plan.buckets)}",
                style="" if point.speedup > 1.0 else "dim",
            )
        console.print(table)
        for note in study.notes:
            show(console, f"note: {note}", "yellow")
    along = ("in the number of ranks", f"in density, P = {question.at}", f"in bandwidth, P = {question.at}")
    table = plain_table("Where dense wins", ("sparsifier", *along))
    for column in table.columns:
        column.justify, column.no_wrap = "left", False
    for study in studies:
        table.add_row(
            study.recipe.describe(),
            crossing_words(study.ranks, lambda size: f"P = {size:.0f}"),
            crossing_words(study.density, lambda value: f"{value:.3g}"),
            crossing_words(study.bandwidth, bandwidth_text),
        )
    console.print(table)


def bandwidth_text(bits: float) -> str:
    """A bandwidth as it is written on cables.

    Example:
        >>> bandwidth_text(2.5e9), bandwidth_text(1e6)
        ('2.5 Gbit/s', '1 Mbit/s')
    """
    for unit, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s")):
        if bits >= unit * 0.9995:
            return f"{bits / unit:.3g} {name}"
    return f"{bits / 1e6:.3g} Mbit/s"


def numbers_of(model: str, merging: str, question: Question, studies: Sequence[Study]) -> dict[str, Any]:
    """The same in plain values; see `print_studies`."""

    def crossing(one: Crossing | None) -> dict[str, Any] | None:
        if one is None:
            return None
        return {
            "values": list(one.values),
            "sparse_first": one.sparse_first,
            "low": one.low,
            "high": one.high,
        }

    return {
        "model": model,
        "merging": merging,
        "alpha_seconds": question.network.alpha_seconds,
        "beta_seconds": question.network.beta_seconds,
        "at": question.at,
        "studies": [
            {
                "sparsifier": study.recipe.describe(),
                "points": [
                    {
                        "size": point.size,
                        "sparse_seconds": point.sparse_seconds,
                        "dense_seconds": point.dense_seconds,
                        "bytes_per_rank": point.bytes_per_rank,
                        "dense_bytes_per_rank": point.dense_bytes_per_rank,
                        "union_density": point.union_density,
                        "buckets": len(point.plan.buckets),
                    }
                    for point in study.points
                ],
                "crossings": {
                    "ranks": crossing(study.ranks),
                    "density": crossing(study.density),
                    "bandwidth": crossing(study.bandwidth),
                },
                "notes": list(study.notes),
            }
            for study in studies
        ],
    }
