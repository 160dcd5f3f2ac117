"""docs/appendix is what was measured, and numbers in the other pages are in it."""

from __future__ import annotations

import re

import pytest

from support.documents import ROOT

pytest.importorskip("mlxtend")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from benchmarks.report.main import main

DOCS = ROOT / "docs"
APPENDIX = sorted((DOCS / "appendix").glob("*.md"))


def test_the_appendix_is_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, f"run scripts/report: {capsys.readouterr().err}"
    for page in APPENDIX:
        assert "scripts/report" in page.read_text("utf-8").splitlines()[0], page.name


def test_every_measurement_is_shown() -> None:
    text = "".join(path.read_text("utf-8") for path in DOCS.rglob("*.md"))
    for path in (DOCS / "measurements").glob("*.json"):
        assert f"measurements/{path.name}" in text, path.name


def test_every_picture_is_shown() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    shown = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text("utf-8"))
    }
    drawn = set((DOCS / "pictures").rglob("*.png"))
    assert shown == drawn, sorted(path.name for path in shown ^ drawn)
    assert all(path.stat().st_size > 1000 for path in drawn)
