"""What README.md and docs/*.md say of names, papers, requirements and measurements is so."""

import configparser
import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from horovod_sparse.feedback import parse_recipe
from horovod_sparse.sparsifiers import ALGORITHMS, Sparsifier
from horovod_sparse.sparsifiers.base import value_text
from horovod_sparse.wire import WireFormat
from support.documents import PAGES, ROOT

DOCS = ROOT / "docs"
#: where a paper may be: arXiv, a publisher by DOI, or its conference
_PAPER = re.compile(
    r"https://(arxiv\.org/abs/\d{4}\.\d{4,5}|doi\.org/10\.\d{4,}/\S+|icml\.cc/virtual/\d+/poster/\d+)"
)
_HOSTS = ("arxiv.org", "doi.org", "icml.cc", "github.com", "conda-forge.org")


def without_code(path: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_links_elsewhere_lead_to_hosts_that_are_known() -> None:
    found = {link for page in PAGES for link in re.findall(r"\]\((\w+://[^)\s]+)\)", without_code(page))}
    assert found and not [link for link in found if not re.match(rf"https://({'|'.join(_HOSTS)})/", link)]


def test_every_page_is_found_from_the_first() -> None:
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
    pytest.importorskip("horovod")
    pytest.importorskip("torch")
    names = {
        name
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for name in re.findall(r"`(horovod_sparse(?:\.\w+)+)`", without_code(page))
    }
    assert len(names) >= 3
    for name in sorted(names):
        if ".tensorflow" in name:
            pytest.importorskip("tensorflow")
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_files_in_the_text_exist(page: str) -> None:
    names = set(re.findall(r"`([\w/]+\.py)`", without_code(ROOT / page)))
    assert len(names) >= 10
    for name in names:
        assert (ROOT / name).exists() or any((ROOT / "horovod_sparse").rglob(name)), name


_TEXT = (DOCS / "algorithms.md").read_text()
_SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", _TEXT, re.MULTILINE | re.DOTALL))
_COMMON = {item.name for item in dataclasses.fields(Sparsifier)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_arguments_and_defaults(name: str) -> None:
    assert set(_SECTIONS) == set(ALGORITHMS)
    found = re.search(r"^Defaults: (.*?)\n\n", _SECTIONS[name], re.MULTILINE | re.DOTALL)
    written = dict(re.findall(r"`(\w+)=([^`]*)`", found[1] if found else ""))
    own = [item for item in dataclasses.fields(ALGORITHMS[name]) if item.name not in _COMMON]
    assert written == {item.name: value_text(item.default) for item in own}


_RECIPES = [
    line
    for block in re.findall(r"```recipe\n(.*?)```", _TEXT, re.DOTALL)
    for line in block.strip().splitlines()
]


@pytest.mark.parametrize("text", _RECIPES)
def test_recipes_can_be_given_as_they_stand(text: str) -> None:
    assert parse_recipe(parse_recipe(text).describe()) == parse_recipe(text)


def test_bytes_per_element() -> None:
    rows = re.findall(r"^\| `values=(\w+)`[^|]*\|(.*)\|$", _TEXT, re.MULTILINE)
    assert [name for name, _ in rows] == ["exact", "float16", "2bit"]
    for values, cells in rows:
        for indices, cell in zip(("int32", "gaps"), cells.split("|"), strict=True):
            found = [float(number) for number in re.findall(r"[\d.]+", cell)]
            counts = (25_600, 256_000)
            wire = WireFormat(values, indices)
            expected = [round(wire.message_bytes(k, 25_600_000, "float32") / k, 2) for k in counts]
            assert found == expected


_SETTINGS = configparser.ConfigParser()
_SETTINGS.read(ROOT / "setup.cfg")


def _lines(text: str) -> list[Requirement]:
    return [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]


def test_the_conda_environment_has_what_the_package_needs() -> None:
    wanted = _lines(_SETTINGS["options"]["install_requires"]) + _lines(
        _SETTINGS["options.extras_require"]["mpi"]
    )
    given = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))["dependencies"]
    *packages, pip = given
    by_name = {re.split(r"[=<>]", item)[0]: item for item in packages}
    for requirement in wanted:
        assert by_name[requirement.name] == str(requirement).replace(" ", ""), requirement
    python = Version(by_name["python"].partition("=")[2])
    assert python in Requirement("python" + _SETTINGS["options"]["python_requires"]).specifier
    builder = (ROOT / "scripts" / "lib" / "horovod" / "build_wheel").read_text("utf-8")
    version = re.search(r"^version=([\d.]+)$", builder, re.MULTILINE)
    assert version and by_name["horovod"].startswith(f"horovod={version[1]}=")
    assert pip["pip"] == ["-e ."]


def test_every_requirement_is_locked_to_a_version_that_fits() -> None:
    lines = (ROOT / "scripts" / "locked.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    versions = {str(canonicalize_name(name)): version for name, version in pairs}
    # none says where a build came from
    assert not [version for version in versions.values() if "+" in version or "@" in version]
    extras = dict(_SETTINGS["options.extras_require"])
    assert all("==" in line for line in extras.pop("docs").split())
    texts = [_SETTINGS["options"]["install_requires"], *extras.values()]
    wanted = [requirement for text in texts for requirement in _lines(text)]
    assert len(wanted) > 10
    for requirement in wanted:
        name = {"tensorflow": "tensorflow-cpu"}.get(requirement.name, requirement.name)
        assert requirement.specifier.contains(versions[str(canonicalize_name(name))]), requirement


def test_the_appendix_and_pictures_are_what_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlxtend", "matplotlib"):
        pytest.importorskip(name)
    from benchmarks.report.main import PICTURES, main

    assert main(["--check"]) == 0, f"run scripts/report: {capsys.readouterr().err}"
    for page in (DOCS / "appendix").glob("*.md"):
        assert "scripts/report" in page.read_text("utf-8").splitlines()[0], page.name
    read, make = PICTURES["demo"]
    monkeypatch.setitem(PICTURES, "demo", (lambda: read() | {"seconds": 1.0}, make))
    assert main(["--check"]) == 1 and "pictures/demo.png" in capsys.readouterr().err


def test_every_measurement_and_picture_is_shown() -> None:
    text = "".join(path.read_text("utf-8") for path in DOCS.rglob("*.md"))
    for path in (DOCS / "measurements").glob("*.json"):
        assert f"measurements/{path.name}" in text, path.name
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
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return set(_NUMBER.findall(text))


def measured() -> set[str]:
    found = set()
    for page in DOCS.rglob("*.md"):
        tables = re.findall(r"<!-- table: .*?<!-- end of table -->", page.read_text("utf-8"), re.DOTALL)
        for number in re.findall(r"\d[\d,]*(?:\.\d+)?", " ".join(tables)):
            found.add(number)
            plain = number.replace(",", "")
            if "." in plain:
                places = len(plain.partition(".")[2])
                found |= {f"{float(plain):,.{digits}f}" for digits in range(places)}
    return found


#: what is no measurement of ours (sizes of models, numbers of steps), or a quotient of two: by page
OTHERWISE = {
    "report.md": {"0.12", "0.83", "1,000", "1,500", "25.6", "3,000", "10,000"},
    "tuning.md": {"3,000", "10,000"},
    # the fixed number below which a bucket stays dense
    "merging.md": {"65,536"},
    # losses that its script prints; sizes of models
    "README.md": {"0.72", "0.77", "0.12", "0.48", "0.83", "3,000", "25.6"},
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_numbers_are_in_the_appendix(name: str) -> None:
    page = ROOT / name if name == "README.md" else DOCS / name
    assert numbers(page.read_text("utf-8")) - measured() <= OTHERWISE[name]
