"""docs/papers.md: no row without a state, no made-up command, and all five papers."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "papers.md").read_text("utf-8")
STATES = {"reproduced", "in shape", "not seen", "not tested"}


def rows() -> list[list[str]]:
    after = PAGE.partition("## ExDyna")[2]
    lines = [line for line in after.splitlines() if line.startswith("| ") and not line.startswith("| what ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_has_a_state_and_what_was_found_has_a_command() -> None:
    found = rows()
    assert len(found) > 30
    for what, state, _theirs, ours, command in found:
        assert state in STATES, what
        if state != "not tested":
            assert ours and (command or "a test holds" in ours), what


def test_commands_are_there() -> None:
    named = set(re.findall(r"`scripts/([a-z_]+)", PAGE))
    assert {"study", "bench"} <= named
    assert all((ROOT / "scripts" / name).is_file() for name in named)


def test_all_papers_are_held() -> None:
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert headings[:5] == ["ExDyna", "MiCRO", "OMGS-SGD", "DRAGONN", "SparDL"]
