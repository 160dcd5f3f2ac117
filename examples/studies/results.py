"""Where measurements lie, and tables of them in docs/appendix."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "MEASUREMENTS",
    "PICTURES",
    "command_line",
    "load",
    "machine",
    "markdown",
    "save",
    "write_appendix",
]

_DOCS = Path(__file__).parents[2] / "docs"
MEASUREMENTS = _DOCS / "measurements"
PICTURES = _DOCS / "pictures"


def command_line(
    program: str, text: str | None, file: Path | None = None, timeout_s: float | None = None
) -> argparse.ArgumentParser:
    """What all studies can be told.

    Args:
        program: the script.
        text: what it says of itself.
        file: where numbers go, if that can be chosen.
        timeout_s: for a launch, if it makes any.
    """
    parser = argparse.ArgumentParser(
        prog=program, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", action="store_true", help="measure everything anew")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    if timeout_s is not None:
        told = "of a launch (default %(default)s)"
        parser.add_argument("--timeout", type=float, default=timeout_s, metavar="SECONDS", help=told)
    if file is not None:
        parser.add_argument("--json", type=Path, default=file, metavar="FILE", help="(default %(default)s)")
    return parser


def load(path: Path) -> dict[str, Any]:
    """What was measured so far; nothing if the file is missing."""
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: Path, result: dict[str, Any]) -> None:
    """Writes a measurement, one line per run, so that a change shows which run it belongs to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for key, value in result.items():
        if key == "runs":
            runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in value.items())
            lines.append(f' "runs": {{\n{runs}\n }}')
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def machine() -> str:
    """What it ran on, without names."""
    return f"{platform.machine()}, Python {platform.python_version()}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; all columns but the first stand to the right.

    Example:
        >>> print(markdown(["a", "b"], [["x", "1"]]))
        | a | b |
        |---|---:|
        | x | 1 |
    """
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *rows]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    text[1] = text[1].replace(" ", "")
    return "\n".join(text)


def write_appendix() -> None:
    """Writes the tables of all studies anew."""
    # it imports every study, and they import this
    from studies import appendix

    appendix.write()
