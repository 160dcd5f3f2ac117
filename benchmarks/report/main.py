"""Fills the tables of docs/performance.md from the measurements in docs/measurements/*.json."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.budgets import budget_table
from benchmarks.report.tables import (
    frameworks_table,
    growth_table,
    launch_tables,
    local_table,
    tape_table,
    wire_table,
)

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_RENDERERS = {
    "local": local_table,
    "frameworks": frameworks_table,
    "growth": growth_table,
    "tape": tape_table,
    "wire": wire_table,
}
#: how the names of measurements begin that this page shows
_KINDS = {*_RENDERERS, "rounds", "sync", "train"}


def tables(measurements: dict[str, Any]) -> dict[str, str]:
    """Every table that can be made.

    Args:
        measurements: content of the JSON files by their names without ending.

    Returns:
        Markdown by name of the table: that of the file, and "budgets". A file whose name begins with
        local, frameworks, growth, tape or wire has a table of its own kind; others have one per launch.
    """
    made = {}
    for name, result in measurements.items():
        render = _RENDERERS.get(name.partition("_")[0], launch_tables)
        made[name] = render(result)
    return {**made, "budgets": budget_table(measurements)}


def fill(text: str, made: dict[str, str]) -> str:
    r"""Puts tables between their markers.

    Args:
        text: with ``<!-- table: NAME -->`` and ``<!-- end of table -->`` on lines of their own.
        made: tables by name.

    Returns:
        The text; where there is no table of a name, that is said.

    Example:
        >>> print(fill("<!-- table: x -->\nold\n<!-- end of table -->", {"x": "new"}))
        <!-- table: x -->
        new
        <!-- end of table -->
    """

    def replace(match: re.Match[str]) -> str:
        table = made.get(match[2], "Not measured yet.").strip("\n")
        return f"{match[1]}{table}\n{match[3]}"

    return _MARKED.sub(replace, text)


def read(folder: Path) -> dict[str, Any]:
    """Content of the JSON files that `scripts/bench` made; studies have pages and checks of their own."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.stem.partition("_")[0] in _KINDS]
    return {path.stem: json.loads(path.read_text()) for path in paths}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes docs/performance.md anew, or checks it.

    Args:
        arguments: of the command line; None takes the process's own.

    Returns:
        The exit code: 1 if --check found the page out of step.
    """
    parser = argparse.ArgumentParser(prog="scripts/report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if something would change")
    options = parser.parse_args(arguments)
    page = _DOCS / "performance.md"
    before = page.read_text()
    after = fill(before, tables(read(_DOCS / "measurements")))
    if options.check:
        return int(before != after)
    page.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
