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

from benchmarks.common.hosts import cluster_for, machine_facts
from benchmarks.common.options import add_common, carry_out, count, launch, named_sparsifiers
from benchmarks.common.pages import markdown

_OTHERS = ("topk", "topk_dsa", "gtopk", "oktopk", "oktopk:threshold_steps=4")


def _default_sparsifiers(num_ranks: int) -> str:
    """The family, and SparDL with every number of teams."""
    teams = [f"spardl:teams={d}" for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    return " ".join([*_OTHERS, *teams, "spardl:teams=1,gather=bruck"])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="scripts/bench allreduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--elements", type=count, default=25_600_000, help="n (default %(default)s)")
    made.add_argument(
        "--add", action="store_true", help="add the launches to those of --json's file, where it exists"
    )
    add_common(made, ["the family; spardl with every number of teams"], ())
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command line asks for, as it is written to JSON."""
    machine, launches = machine_facts(), []
    with cluster_for(max(options.hosts) if options.hosts else None, options.rate, options.name) as hosts:
        for num_ranks in options.hosts or [hosts.num_hosts]:
            text = options.sparsifiers
            if text == parser().get_default("sparsifiers"):
                text = _default_sparsifiers(num_ranks)
            sparsifiers = named_sparsifiers(text, options.density)
            settings = {
                "elements": options.elements,
                "density": options.density,
                "sparsifiers": sparsifiers,
                "repeat": options.repeat,
            }
            for network in options.networks or ["gloo"]:
                found = launch(
                    "benchmarks.allreduce.rank",
                    settings,
                    options,
                    hosts=hosts,
                    network=network,
                    num_ranks=num_ranks,
                    total=len(sparsifiers) * (options.repeat + 2),
                )
                launches.append({"elements": options.elements, "density": options.density, **found})
    return {"benchmark": "allreduce", "machine": machine, "launches": launches}


def _milliseconds(spread: dict[str, float]) -> str:
    return f"{1e3 * spread['median']:.1f} ({1e3 * spread['low']:.1f} to {1e3 * spread['high']:.1f})"


def _table(one: dict[str, Any]) -> str:
    medians = {item["method"]: item["communication"]["seconds"]["median"] for item in one["results"]}
    best = min((name for name in medians if name.startswith("spardl")), key=medians.__getitem__, default=None)
    rows = []
    for item in one["results"]:
        name, facts, times = item["method"], item["step"]["facts"], medians[item["method"]]
        rows.append(
            [
                f"**`{name}`**" if name == best else f"`{name}`",
                _milliseconds(item["communication"]["seconds"]),
                "-" if best is None else f"{times / medians[best]:.2f}",
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
    return carry_out("allreduce", arguments, parser().parse_args(arguments), measure, tables)


if __name__ == "__main__":
    sys.exit(main())
