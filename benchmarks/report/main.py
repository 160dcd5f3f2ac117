"""Writes docs/appendix, the table in README.md and the pictures from docs/measurements/*.json."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.allreduce.main import tables as allreduce_table
from benchmarks.common.pages import FOLDER, page
from benchmarks.common.tables import (
    bandwidth_table,
    frameworks_table,
    growth_table,
    hosts_table,
    launch_tables,
    local_table,
    wire_table,
)
from benchmarks.report import appendix
from benchmarks.report.pictures import draw
from benchmarks.report.plans import loss_table, paper_table, random_table
from benchmarks.studies import appendix as studies

_ROOT = Path(__file__).resolve().parents[2]
_DOCS = _ROOT / "docs"
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def _plans(result: Any) -> str:
    return "\n\n".join(make(result) for make in (random_table, paper_table, loss_table))


#: by name of a measurement, or by how it begins
_RENDERERS = {
    "merging": _plans,
    "merging_hosts": hosts_table,
    "merging_names": hosts_table,
    "levels_merging": hosts_table,
    "sparse_allreduce": allreduce_table,
    "bandwidth": bandwidth_table,
    "local": local_table,
    "frameworks": frameworks_table,
    "growth": growth_table,
    "wire": wire_table,
}
#: by file: title, the page that says what it means, sections
_PAGES = {
    "performance.md": ("Measurements of time and bytes", "performance.md", appendix.PERFORMANCE),
    "plans.md": ("Measurements of plans", "merging.md", appendix.PLANS),
}


def tables(measurements: dict[str, Any]) -> dict[str, str]:
    """Every table that can be made.

    Args:
        measurements: content of the JSON files by their names without ending.

    Returns:
        Markdown by name of the file. Files of a kind that is not known have one per launch.
    """
    made = {}
    for name, result in measurements.items():
        render = _RENDERERS.get(name) or _RENDERERS.get(name.partition("_")[0], launch_tables)
        made[name] = render(result)
    return made


def pages(made: dict[str, str]) -> dict[Path, str]:
    """What `docs/appendix` has to hold of these tables, by file."""
    found = {}
    for name, (title, prose, sections) in _PAGES.items():
        about = f"What they mean is in [{prose}](../{prose})."
        found[FOLDER / name] = page(title, about, sections, made)
    return found


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
    """Content of the JSON files that `scripts/bench` made and a page shows."""
    names = {name for _, _, sections in _PAGES.values() for section in sections for name in section.names}
    return {
        path.stem: json.loads(path.read_text())
        for path in sorted(folder.glob("*.json"))
        if path.stem in names
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the appendix, the table in README.md and the pictures anew, or checks them.

    Returns the exit code: 1 if --check found one of them out of step.
    """
    parser = argparse.ArgumentParser(prog="scripts/report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if something would change")
    options = parser.parse_args(arguments)
    measurements = read(_DOCS / "measurements")
    made = tables(measurements)
    readme, demo = _ROOT / "README.md", json.loads((_DOCS / "measurements" / "demo.json").read_text())
    texts = {
        **pages(made),
        **studies.pages(),
        readme: fill(readme.read_text(), {"demo": studies.TABLES["demo"](demo)}),
    }
    stale = False
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            stale = True
            if options.check:
                print(f"{path.relative_to(_ROOT)} is not what was measured", file=sys.stderr)
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    drawn = draw(measurements, made, _DOCS / "pictures", check=options.check)
    return int(options.check and (stale or not drawn))


if __name__ == "__main__":
    sys.exit(main())
