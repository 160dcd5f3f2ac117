"""Compares a sparse run of an example with a dense one, from the JSON files that both wrote.

python examples/compare.py sparse.json dense.json --min-accuracy 0.93 --min-saving 20
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Run = dict[str, Any]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sparse", type=Path)
    parser.add_argument("dense", type=Path)
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="least accuracy of the sparse run")
    parser.add_argument("--min-saving", type=float, default=0.0, help="least factor by which bytes shrink")
    return parser.parse_args()


def milliseconds(name: str) -> Callable[[Run], str]:
    """A mean time per step, where the run measured it."""
    return lambda run: f"{run[name] * 1e3:.2f} ms" if run.get(name) is not None else "-"


def fraction(name: str) -> Callable[[Run], str]:
    """A density, where the run has one."""
    return lambda run: f"{run[name]:.4%}" if run.get(name) is not None else "-"


ROWS: list[tuple[str, Callable[[Run], str]]] = [
    ("test accuracy", lambda run: f"{run['accuracy']:.1%}"),
    ("ranks, steps, parameters", lambda run: f"{run['size']}, {run['steps']}, {run['num_parameters']:,}"),
    ("gradient bytes per step and rank", lambda run: f"{run['bytes_per_step']:,.0f}"),
    ("gradient bytes in total", lambda run: f"{run['bytes_per_step'] * run['steps']:,.0f}"),
    ("density asked", fraction("density_asked")),
    ("density achieved (union of ranks)", fraction("density_union")),
    ("mean time per step", milliseconds("step_seconds")),
    ("    fold (residual += gradient)", milliseconds("fold_seconds")),
    ("    select and pack", milliseconds("select_seconds")),
    ("    wait for the network", milliseconds("wait_seconds")),
    ("    apply", milliseconds("apply_seconds")),
]


def main() -> int:
    """Prints the table; 0 if the sparse run is good enough."""
    args = arguments()
    sparse, dense = (json.loads(path.read_text()) for path in (args.sparse, args.dense))
    saving = dense["bytes_per_step"] / sparse["bytes_per_step"]
    table = Table("", sparse["compression"], f"dense ({dense['compression']})")
    for name, show in ROWS:
        table.add_row(name, show(sparse), show(dense))
    console = Console()
    console.print(table)
    failures = []
    if sparse["accuracy"] < args.min_accuracy:
        failures.append(f"accuracy {sparse['accuracy']:.1%} is below {args.min_accuracy:.1%}")
    if saving < args.min_saving:
        failures.append(f"traffic shrank {saving:.1f} times, not {args.min_saving:g} times")
    if failures:
        console.print(f"[bold red]not good enough:[/] {'; '.join(failures)}")
        return 1
    console.print(f"[bold green]{saving:.1f} times less gradient traffic[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
