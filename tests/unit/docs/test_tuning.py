"""Figures of docs/tuning.md are those of the measurements that it names."""

from __future__ import annotations

import re

from support.documents import ROOT

_TUNING = (ROOT / "docs" / "tuning.md").read_text("utf-8")
_RESULTS = (ROOT / "docs" / "appendix" / "results.md").read_text("utf-8")


def _table(head: str) -> list[list[str]]:
    """The cells of the table in the appendix whose head begins so, line by line."""
    lines = _RESULTS[_RESULTS.index(f"\n| {head}") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _rows(head: str) -> dict[str, list[float]]:
    """The numbers in parentheses of every row, by its first column."""
    return {
        cells[0].strip("`"): [float(found) for found in re.findall(r"\(([+-][\d.]+)\)", "|".join(cells))]
        for cells in _table(head)
    }


def _quoted(beginning: str) -> list[list[float]]:
    """The cells of a row of the table about momentum."""
    (line,) = [line for line in _TUNING.splitlines() if line.startswith(f"| {beginning}")]
    return [[float(n) for n in re.findall(r"[+-][\d.]+", cell)] for cell in line.strip("| ").split("|")[1:]]


def test_momentum() -> None:
    trainings, remedies = _rows("training"), _rows("remedy")
    plain = [deltas for name, deltas in trainings.items() if name.startswith("SGD,")]
    for column, cell in enumerate(_quoted("SGD without momentum")):
        values = [deltas[column] for deltas in plain]
        assert cell == [min(values), max(values)]
    pairs = {
        "momentum 0.9, the rate goes to 0": ("momentum, cosine to 0", "momentum, one-cycle"),
        "momentum 0.9, constant rate": ("momentum, constant",),
        "momentum 0.9, warm restarts": ("momentum, warm restarts",),
        "AdamW, the rate goes to 0": ("AdamW, cosine to 0", "AdamW, one-cycle"),
    }
    for beginning, names in pairs.items():
        assert _quoted(beginning) == [[trainings[name][column] for name in names] for column in (0, 1)]
    assert _quoted('the same with `feedback="momentum"`') == [[v] for v in remedies["feedback=momentum"]]
    assert _quoted("the same without momentum") == [[v] for v in remedies["no momentum, ten times the rate"]]


def test_density() -> None:
    others = ("none", "fp16", "randomk", "hard_threshold", "signsgd", "qsgd")
    rows = [row for row in _table("compression | accuracy") if re.fullmatch(r"\w+", row[0])]
    found = [row for row in rows if row[0] not in others]
    assert len(found) >= 10
    behind, savings = zip(*((float(c[4]), int(c[6].rstrip("x"))) for c in found), strict=True)
    quoted = re.search(r"within ([\d.]+) points of dense, and sends (\d+) to (\d+) times less", _TUNING)
    assert quoted is not None
    assert [float(value) for value in quoted.groups()] == [-min(behind), min(savings), max(savings)]
