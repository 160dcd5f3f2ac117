"""Fills tables and draws pictures of docs and README.md from docs/measurements/*.json."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.budgets import budget_table
from benchmarks.report.pictures import (
    bits_per_second,
    draw,
    predicted_seconds,
    seconds_of,
)
from benchmarks.report.tables import (
    account_table,
    bandwidth_table,
    density_table,
    drift_table,
    frameworks_table,
    growth_table,
    launch_tables,
    local_table,
    predictions_table,
    tape_table,
    wire_table,
)

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def _bandwidth(result: Any) -> str:
    return bandwidth_table(result, [_predicted(result, launch) for launch in result["launches"]])


def _predicted(result: Any, launch: Any) -> tuple[float, float]:
    (recipe,) = launch["sparsifiers"].values()
    return predicted_seconds(result["model"], recipe, launch["ranks"], bits_per_second(launch["rate"]))


_RENDERERS = {
    "account": account_table,
    "bandwidth": _bandwidth,
    "local": local_table,
    "frameworks": frameworks_table,
    "growth": growth_table,
    "tape": tape_table,
    "drift": drift_table,
    "wire": wire_table,
    "predictions": predictions_table,
    "density": density_table,
}
#: how the names of measurements begin that this page shows
_KINDS = {*_RENDERERS, "ddp", "digits", "quantizers", "rounds", "sync", "train"}


def tables(measurements: dict[str, Any]) -> dict[str, str]:
    """Every table that can be made.

    Args:
        measurements: content of the JSON files by their names without ending.

    Returns:
        Markdown by name of the table: that of the file, and "budgets". A file whose name begins with account,
        bandwidth, local, frameworks, growth, tape, drift, wire, predictions or density has a table of
        its own kind; others have one per launch.
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


def number(measurements: dict[str, Any]) -> str:
    """The sentence that README.md begins with; "" without its measurement.

    Example:
        >>> items = [
        ...     {"method": "dense", "seconds": {"median": 2.0}},
        ...     {"method": "exdyna", "seconds": {"median": 0.5}},
        ... ]
        >>> number({"bandwidth": {"launches": [{"rate": "1gbit", "ranks": 4, "results": items}]}})
        '**At 1 Gbit/s a step takes 0.50 s instead of 2.00 s: 4.0 times faster.**'
    """
    for launch in measurements.get("bandwidth", {}).get("launches", []):
        if launch["rate"] == "1gbit":
            times = seconds_of(launch)
            dense = times.pop("dense")
            (sparse,) = times.values()
            return (
                f"**At 1 Gbit/s a step takes {sparse:.2f} s instead of {dense:.2f} s: "
                f"{dense / sparse:.1f} times faster.**"
            )
    return ""


def read(folder: Path) -> dict[str, Any]:
    """Content of the JSON files that `scripts/bench` made; studies have pages and checks of their own."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.stem.partition("_")[0] in _KINDS]
    return {path.stem: json.loads(path.read_text()) for path in paths}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes tables of docs/, the number in README.md and the pictures anew, or checks them.

    Args:
        arguments: of the command line; None takes the process's own.

    Returns:
        The exit code: 1 if --check found one of them out of step.
    """
    parser = argparse.ArgumentParser(prog="scripts/report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if something would change")
    options = parser.parse_args(arguments)
    measurements = read(_DOCS / "measurements")
    made = {**tables(measurements), "number": number(measurements)}
    stale = False
    for page in (_DOCS / "performance.md", _DOCS / "merging.md", _DOCS.parent / "README.md"):
        before = page.read_text()
        after = fill(before, made)
        stale |= before != after
        if not options.check:
            page.write_text(after)
    drawn = draw(measurements, made, _DOCS / "pictures", check=options.check)
    return int(options.check and (stale or not drawn))


if __name__ == "__main__":
    sys.exit(main())
