"""Links of README.md and docs/*.md lead to files and headings that are there; papers are linked."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from support.documents import PAGES, ROOT

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
#: where a paper may be: arXiv, a publisher by DOI, or its conference
_PAPER = re.compile(
    r"https://(arxiv\.org/abs/\d{4}\.\d{4,5}|doi\.org/10\.\d{4,}/\S+|icml\.cc/virtual/\d+/poster/\d+)"
)
_HOSTS = ("arxiv.org", "doi.org", "icml.cc", "github.com", "conda-forge.org")


def without_code(path: Path) -> str:
    """The text of a page, code blocks left out."""
    return re.sub(r"^( *)```.*?^\1```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Those of a page's headings, as GitHub and the site make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_code(path), re.MULTILINE):
        words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(without_code(page)):
        if "://" in link:
            host = link.split("/")[2]
            assert link.startswith("https://") and host in _HOSTS, f"{link}: a host that no test knows"
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() and ROOT in [target, *target.parents], f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_found_from_the_first() -> None:
    """From README.md, and in the menu of the site."""
    readme, menu = ((ROOT / name).read_text("utf-8") for name in ("README.md", "mkdocs.yml"))
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert f"](docs/{page.name})" in readme, page.name
        assert f": {page.name}\n" in menu, page.name


def test_every_algorithm_links_its_paper() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text("utf-8")
    sources = re.findall(r"^Sources?: .*?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(sources) >= 10
    for source in sources:
        assert _PAPER.search(source), source
    for link in re.findall(r"https://\S+?(?=[)\s])", text):
        assert _PAPER.fullmatch(link), link
    assert _PAPER.search((ROOT / "docs" / "merging.md").read_text("utf-8"))


def test_names_in_the_text_exist() -> None:
    """`horovod_sparse.torch.load` and the like: a name that was renamed is found here."""
    pytest.importorskip("horovod")
    pytest.importorskip("torch")
    names = {
        name
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for name in re.findall(r"`(horovod_sparse(?:\.\w+)+)`", without_code(page))
    }
    assert len(names) >= 5
    for name in sorted(names):
        if ".tensorflow" in name:
            pytest.importorskip("tensorflow")
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name
