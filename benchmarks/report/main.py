"""Writes tables in docs, and pictures, that are not what docs/measurements/*.json say.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. A picture names the hash of what it
was made of; after a change of the code that draws it, remove it first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import demo
from matplotlib.figure import Figure
from PIL import Image

from benchmarks import allreduce, plans
from benchmarks.common.tables import hosts_table, launch_tables, matrix_table, timings_table
from benchmarks.report import paper_pictures as papers
from benchmarks.report import pictures, rooms
from benchmarks.studies import (
    adamw,
    convergence,
    lengths,
    local,
    networks,
    passes,
    sizes,
)
from benchmarks.studies.papers import sixteen, tables, trainings
from benchmarks.studies.study import MEASUREMENTS, ROOT, Result, measured

STUDIES = (
    *(one.STUDY for one in (adamw, convergence, lengths, local, networks, passes, sizes)),
    *(sixteen.STUDY, trainings.RANKS_STUDY, trainings.TEAMS_STUDY),
)
#: by name of the measurement, and of a table of it; the tables of others are those of launches
TABLES: dict[str, Callable[[Result], str]] = {
    **{one.file.stem: one.table for one in STUDIES},
    **dict.fromkeys((file.stem for file in MEASUREMENTS.glob("merging_*.json")), hosts_table),
    **dict.fromkeys(("frameworks", "local", "optimizer_steps"), timings_table),
    "demo": demo.table,
    "merging": plans.tables,
    "matrix": matrix_table,
    "paper_workers": partial(tables.beside_spardl, fact="ranks", shown="P = {:g}"),
    "paper_densities": partial(tables.beside_spardl, fact="density", shown="density {:g}"),
    "sparse_allreduce": allreduce.tables,
    "train_parts": tables.parts,
}
_TABLE = re.compile(r"(<!-- table: ((\w+)[.\w]*) -->\n).*?(\n<!-- end of table -->)", re.DOTALL)
#: by name in docs/pictures: what a picture is made of, and the figure
PICTURES: dict[str, tuple[Callable[[], Any], Callable[[Any], Figure]]] = {
    name: (partial(measured, measurement), make)
    for name, measurement, make in (
        ("bandwidth", "bandwidth", pictures.bandwidth),
        ("demo", "demo", demo.draw),
        ("sync_gloo", "sync_gloo", pictures.synchronization),
        ("densities", "lengths", pictures.densities),
        ("late_or_rare", "passes", pictures.late_or_rare),
        ("papers/exdyna_density", "papers", papers.density),
        ("papers/micro_errors", "papers", papers.errors),
    )
}
PICTURES["rooms"] = rooms.rooms, rooms.picture
PICTURES["frontier"] = lambda: [measured("adamw"), measured("local_steps")], pictures.frontier


def pages() -> dict[Path, str]:
    """Returns the text of every page below docs that shows a measurement, with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES.get(match[2], launch_tables)(measured(match[3])).strip()}\n{match[4]}"

    texts = {path: path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
    return {path: _TABLE.sub(table, text) for path, text in texts.items()}


def stale() -> Iterator[tuple[Path, Callable[[], object]]]:
    """Yields every page and picture that is not what was measured, and a function that writes it."""
    for path, text in pages().items():
        if path.read_text() != text:
            yield path, partial(path.write_text, text)
    for name, (read, make) in PICTURES.items():
        path, found = ROOT / "docs" / "pictures" / f"{name}.png", read()
        made_of = hashlib.sha256(json.dumps(found).encode()).hexdigest()
        if not path.exists() or Image.open(path).info.get("made of") != made_of:
            yield path, partial(_save, path, make, found, made_of)


def _save(path: Path, make: Callable[[Any], Figure], found: Any, made_of: str) -> None:
    make(found).savefig(path, dpi=110, metadata={"Software": None, "made of": made_of})


def study(arguments: Sequence[str]) -> int:
    """`scripts/study NAME`: runs a study, and makes pages and pictures anew."""
    studies = {one.name: one for one in STUDIES}
    name, *rest = arguments or ["--help"]
    if name not in studies:
        print(f"scripts/study NAME [--help]: one of {', '.join(sorted(studies))}", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    studies[name].main(rest)
    return main([])


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes what is stale, or names it.

    Returns the exit code: 1 if --check found something.
    """
    parser = argparse.ArgumentParser(prog="scripts/report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if something is stale")
    options = parser.parse_args(arguments)
    found = dict(stale())
    for path, write in found.items():
        if options.check:
            print(f"{path.relative_to(ROOT)} is not what was measured", file=sys.stderr)
        else:
            write()
    return int(options.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
