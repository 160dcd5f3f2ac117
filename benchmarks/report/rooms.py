"""The picture of the rooms: which part of horovod_sparse imports which, read from its source."""

from __future__ import annotations

import ast
import textwrap
from functools import cache
from itertools import pairwise
from statistics import fmean

import grimp
from matplotlib.figure import Figure

from benchmarks.studies.study import ROOT


def rooms() -> dict[str, tuple[str, list[str]]]:
    """Returns for each room its words, and what it imports, less what one of these imports as well."""
    graph = grimp.build_graph("horovod_sparse", cache_dir=None)
    names = graph.find_children("horovod_sparse") - {"horovod_sparse.__main__"}
    for room in names:
        graph.squash_module(room)
    found = {room: graph.find_modules_directly_imported_by(room) & names - {room} for room in sorted(names)}

    @cache
    def behind(room: str) -> frozenset[str]:
        return frozenset().union(*(found[other] | behind(other) for other in found[room]))

    return {room: (words(room), sorted(others - behind(room))) for room, others in found.items()}


def words(room: str) -> str:
    """Returns a room's name and the first sentence of its docstring, in four lines."""
    path = ROOT / room.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    first = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0].partition(". ")[0]
    lines = textwrap.wrap(first.removesuffix("."), 36, max_lines=3, placeholder=" ...")
    return "\n".join([rf"$\bf{{{room.partition('.')[2]}}}$", *lines, *[""] * (3 - len(lines))])


def picture(found: dict[str, tuple[str, list[str]]]) -> Figure:
    """Draws rooms below all that import them, entrances just above their imports.

    A line that passes a row has a narrow place of its own there, so that it crosses no box.
    """

    @cache
    def depth(room: str) -> int:
        return max((depth(other) + 1 for other in found if room in found[other][1]), default=0)

    row = {room: depth(room) or min(map(depth, found[room][1])) - 1 for room in found}
    lines = [
        [room, *(f"{room}>{other}>{n}" for n in range(row[room] + 1, row[other])), other]
        for room in found
        for other in found[room][1]
    ]
    row |= {name: row[line[0]] + n for line in lines for n, name in enumerate(line)}
    pairs = [pair for line in lines for pair in pairwise(line)]
    beside: dict[str, list[str]] = {}
    for name, other in [*pairs, *((under, above) for above, under in pairs)]:
        beside.setdefault(name, []).append(other)
    at = dict.fromkeys(row, 0.0)
    for number in [*range(max(row.values()) + 1)] * 30:  # rows in the order of their neighbours' mean places
        names = sorted((n for n in row if row[n] == number), key=lambda n: fmean(at[o] for o in beside[n]))
        widths = [0.75 if ">" in name else 3.35 for name in names]
        at |= {n: sum(widths[:i]) + (widths[i] - sum(widths)) / 2 for i, n in enumerate(names)}
    figure = Figure(figsize=(11, 11.5), layout="constrained")
    axis = figure.subplots()
    for above, under in pairs:
        tip = {"arrowstyle": "-" if ">" in under else "-|>", "color": "0.6", "shrinkA": 0, "shrinkB": 0}
        end = at[under], row[under] - 0.33 * (">" not in under)
        axis.annotate("", end, (at[above], row[above]), arrowprops=tip)
    box = {"boxstyle": "round", "facecolor": "#eef4fa", "edgecolor": "#0072B2"}
    for room, (text, _) in found.items():
        axis.text(at[room], row[room], text, ha="center", va="center", fontsize=8, bbox=box)
    half = max(map(abs, at.values())) + 1.7
    axis.set(xlim=(-half, half), ylim=(max(row.values()) + 0.5, -0.6))
    axis.set_title("An arrow: imports. Arrows that follow from others are left out.", fontsize=9)
    axis.axis("off")
    return figure
