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


def test_momentum() -> None:
    """Ranges over all schedules, as docs/results.md has them."""
    told = (ROOT / "docs" / "results.md").read_text("utf-8").replace("*", "")
    points: dict[str, list[list[float]]] = {"SGD": [], "momentum": [], "AdamW": []}
    for row in _table("training"):
        optimizer, _, _ = row[0].partition(",")
        if optimizer in points:  # topk, exdyna, and both with feedback=best
            cells = row[2:4] if optimizer == "SGD" else row[2:4] + row[5:7]
            points[optimizer].append([float(cell.partition("(")[2].rstrip(")")) for cell in cells])
    for rows in points.values():
        topk, exdyna, *best = zip(*rows, strict=True)
        for values in best or (topk, exdyna):
            assert f"{min(values):+.1f} to {max(values):+.1f}" in told
        if best:
            assert f"{min(topk + exdyna):+.1f} to {max(topk + exdyna):+.1f}" in told


def test_density() -> None:
    others = ("none", "fp16", "randomk", "hard_threshold", "signsgd", "qsgd")
    rows = [row for row in _table("compression | accuracy") if re.fullmatch(r"\w+", row[0])]
    found = [row for row in rows if row[0] not in others]
    assert len(found) >= 10
    behind, savings = zip(*((float(c[4]), int(c[6].rstrip("x"))) for c in found), strict=True)
    quoted = re.search(r"within ([\d.]+) points of dense, and sends (\d+) to (\d+) times less", _TUNING)
    assert quoted is not None
    assert [float(value) for value in quoted.groups()] == [-min(behind), min(savings), max(savings)]
