"""Numbers in the pages that tell of measurements are in the appendix, or in what a page says of a paper."""

from __future__ import annotations

import re

import pytest

from support.documents import ROOT

DOCS = ROOT / "docs"
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
    # made of milliseconds by scripts/report
    "README.md": {"1.63", "0.43"},
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_numbers_are_in_the_appendix(name: str) -> None:
    page = ROOT / name if name == "README.md" else DOCS / name
    assert numbers(page.read_text("utf-8")) - measured() <= OTHERWISE[name]
