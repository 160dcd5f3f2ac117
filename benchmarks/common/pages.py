"""Pages of docs/appendix: headings, notes, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOLDER", "Section", "markdown", "page"]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "appendix"
_FIRST = (
    "This page is written whole by `scripts/report` from the JSON files in "
    "[measurements](../measurements): do not edit it."
)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column holds words, the others numbers.

    Example:
        >>> print(markdown(["", "ms"], [["fold", "9.5"]]))
        |  | ms |
        |---|---:|
        | fold | 9.5 |
    """
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    lines.insert(1, "|---|" + "---:|" * (len(head) - 1))
    return "\n".join(lines)


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: its heading.
        note: how its tables are to be read.
        names: of the tables, in order.
        command: that measures them again, where the tables do not say it.
    """

    title: str
    note: str
    names: tuple[str, ...]
    command: str = ""


def page(title: str, about: str, sections: Sequence[Section], tables: Mapping[str, str]) -> str:
    """A page, all of it.

    Args:
        title: its heading.
        about: stands before the first section.
        sections: of the page.
        tables: in Markdown, by name; one that is missing is said to be.
    """
    blocks = [_FIRST, f"# {title}", about]
    for section in sections:
        blocks += [f"## {section.title}", section.note]
        if section.command:
            blocks.append(f"`{section.command}`")
        for name in section.names:
            blocks.append(tables.get(name, "Not measured yet.").strip("\n"))
            if (FOLDER.parent / "measurements" / f"{name}.json").exists():
                blocks.append(f"[{name}.json](../measurements/{name}.json)")
    return "\n\n".join(block for block in blocks if block) + "\n"
