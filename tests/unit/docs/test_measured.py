"""Numbers, tables and pictures of the pages are those of the measurements that are committed."""

from __future__ import annotations

import re

import pytest

from support.documents import ROOT

DOCS = ROOT / "docs"


def test_the_appendix_is_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("mlxtend", "matplotlib", "rich"):
        pytest.importorskip(name)
    from benchmarks.report.main import main

    assert main(["--check"]) == 0, f"run scripts/report: {capsys.readouterr().err}"
    for page in (DOCS / "appendix").glob("*.md"):
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


#: numbers of measurements: with a decimal point, or with a comma between thousands
_NUMBER = re.compile(r"(?<![\w.,/-])\d+(?:,\d{3})+(?:\.\d+)?(?!\w)|(?<![\w.,/-])\d+\.\d+(?![\w.]*\.\w)")


def numbers(text: str) -> set[str]:
    """Those of a text, without code, links and pictures' names."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return set(_NUMBER.findall(text))


def measured() -> set[str]:
    """Those of the appendix, with fewer decimals, too."""
    found = set()
    for page in (DOCS / "appendix").glob("*.md"):
        text = re.sub(r"\]\([^)]*\)", " ", page.read_text("utf-8"))
        for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text):
            found.add(number)
            plain = number.replace(",", "")
            if "." in plain:
                places = len(plain.partition(".")[2])
                found |= {f"{float(plain):,.{digits}f}" for digits in range(places)}
    return found


#: what is no measurement of ours, or a quotient of two: by page
OTHERWISE = {
    "performance.md": {"25.6", "0.82", "1.7", "3.7"},
    "results.md": set(),
    "tuning.md": set(),
    # of formulas, and of the model's own rule
    "merging.md": {"0.25", "0.5", "60,000"},
    "README.md": set(),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_numbers_are_in_the_appendix(name: str) -> None:
    page = ROOT / name if name == "README.md" else DOCS / name
    assert numbers(page.read_text("utf-8")) - measured() <= OTHERWISE[name]


_TUNING = (DOCS / "tuning.md").read_text("utf-8")
_RESULTS = (DOCS / "appendix" / "results.md").read_text("utf-8")


def _table(head: str) -> list[list[str]]:
    """The cells of the table in the appendix whose head begins so, line by line."""
    lines = _RESULTS[_RESULTS.index(f"\n| {head}") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_momentum() -> None:
    """Ranges over all schedules, as docs/results.md has them."""
    told = (DOCS / "results.md").read_text("utf-8").replace("*", "")
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


_PAPERS = (DOCS / "papers.md").read_text("utf-8")


def test_every_row_of_a_paper_has_a_state_and_what_was_found_has_a_command() -> None:
    headings = re.findall(r"^## (.+)$", _PAPERS, re.MULTILINE)
    assert headings[:5] == ["ExDyna", "MiCRO", "OMGS-SGD", "DRAGONN", "SparDL"]
    rows = re.findall(r"^\| (?!what )(.*) \|$", _PAPERS.partition("## ExDyna")[2], re.MULTILINE)
    assert len(rows) > 30
    for row in rows:
        what, state, _theirs, ours, command = (cell.strip() for cell in row.split("|"))
        assert state in ("reproduced", "in shape", "not seen", "not tested"), what
        if state != "not tested":
            assert ours and (command or "a test holds" in ours), what
    named = set(re.findall(r"`scripts/([a-z_]+)", _PAPERS))
    assert {"study", "bench"} <= named
    assert all((ROOT / "scripts" / name).is_file() for name in named)
