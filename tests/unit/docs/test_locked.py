"""scripts/locked.txt names a version, one that fits, of everything that setup.cfg asks for."""

from __future__ import annotations

import configparser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
#: installed in another flavour or only for some options of scripts/setup
OTHERWISE = {"tensorflow": "tensorflow-cpu"}
#: installed into an environment of its own, and pinned in setup.cfg itself
APART = "docs"


def locked_versions() -> dict[str, str]:
    """Name -> version."""
    lines = (ROOT / "scripts" / "locked.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {str(canonicalize_name(name)): version for name, version in pairs}


def test_every_requirement_is_locked_to_a_version_that_fits() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extras = {name: text for name, text in settings["options.extras_require"].items() if name != APART}
    texts = [settings["options"]["install_requires"], *extras.values()]
    wanted = [Requirement(line) for text in texts for line in text.splitlines() if line and line[0] != "#"]
    assert len(wanted) > 10
    versions = locked_versions()
    for requirement in wanted:
        name = canonicalize_name(OTHERWISE.get(requirement.name, requirement.name))
        assert requirement.specifier.contains(versions[str(name)]), requirement


def test_no_version_says_where_a_build_came_from() -> None:
    assert not [version for version in locked_versions().values() if "+" in version or "@" in version]


def test_what_is_installed_apart_is_pinned() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings["options.extras_require"][APART].split()
    assert lines and all("==" in line for line in lines)
