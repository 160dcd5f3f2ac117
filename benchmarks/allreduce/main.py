"""`scripts/bench allreduce`: what the messages of sparse all-reduces take across hosts, method by method.

All methods sum up the same gradients in the same launch. After every step its messages are sent once more,
without any work in between: that is the communication time, which selections on cores that many ranks share
do not blur.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common.options import (
    add_sparsifiers,
    carry_out,
    count,
    hosts_parser,
    launches,
    named_sparsifiers,
)
from benchmarks.common.pages import markdown

_FAMILY = "the family; spardl with every number of teams"
_OTHERS = ("topk", "topk_dsa", "gtopk", "oktopk", "oktopk:threshold_steps=4")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = hosts_parser("allreduce", __doc__)
    made.add_argument("--elements", type=count, default=25_600_000, help="n (default %(default)s)")
    made.add_argument(
        "--add", action="store_true", help="add the launches to those of --json's file, where it exists"
    )
    add_sparsifiers(made, [_FAMILY])
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command line asks for, as it is written to JSON."""

    def settings(num_ranks: int) -> list[dict[str, Any]]:
        text = options.sparsifiers
        if text == _FAMILY:
            teams = [f"spardl:teams={d}" for d in range(1, num_ranks + 1) if num_ranks % d == 0]
            text = " ".join([*_OTHERS, *teams, "spardl:teams=1,gather=bruck"])
        facts = {"elements": options.elements, "density": options.density, "repeat": options.repeat}
        return [{**facts, "sparsifiers": named_sparsifiers(text, options.density)}]

    return {"launches": launches("benchmarks.allreduce.rank", options, settings)}


def _table(one: dict[str, Any]) -> str:
    medians = {item["method"]: item["communication"]["seconds"]["median"] for item in one["results"]}
    best = min((name for name in medians if name.startswith("spardl")), key=medians.__getitem__, default=None)
    rows = []
    for item in one["results"]:
        name, facts, times = item["method"], item["step"]["facts"], item["communication"]["seconds"]
        rows.append(
            [
                f"**`{name}`**" if name == best else f"`{name}`",
                "{median:.1f} ({low:.1f} to {high:.1f})".format(**{q: 1e3 * s for q, s in times.items()}),
                "-" if best is None else f"{times['median'] / medians[best]:.2f}",
                f"{1e3 * item['step']['seconds']['median']:.0f}",
                f"{facts['rounds']:.0f}",
                f"{item['communication']['bytes_sent'] / 1e3:.0f}",
                f"{facts['density_union']:.2%}",
            ]
        )
    head = ["method", "communication, ms", "to SparDL at best", "step, ms", "rounds", "kB sent", "union"]
    return markdown(head, rows)


def tables(result: dict[str, Any]) -> str:
    """A table for every launch, in Markdown, the best SparDL in bold."""
    parts = []
    for one in result["launches"]:
        network = "MPI" if one["network"].startswith("mpi") else "Gloo"
        head = (
            f"{one['ranks']} hosts at {one['rate']}, {network}, n = {one['elements'] / 1e6:g} million, "
            f"density {one['density']:g}; pairs by {one['transport']}:"
        )
        parts.append(f"{head}\n\n{_table(one)}\n")
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    return carry_out(parser(), arguments, measure, tables)


if __name__ == "__main__":
    sys.exit(main())
