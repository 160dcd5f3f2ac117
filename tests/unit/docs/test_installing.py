"""environment.yml, the Dockerfile and scripts/locked.txt name what setup.cfg and the scripts ask for."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from support.documents import ROOT

_SETTINGS = configparser.ConfigParser()
_SETTINGS.read(ROOT / "setup.cfg")


def _lines(text: str) -> list[Requirement]:
    return [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]


def test_the_conda_environment_has_what_the_package_needs() -> None:
    """Else pip would put other builds beside conda's."""
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


def test_the_table_of_what_was_tried_is_what_was_measured() -> None:
    matrix = ROOT / "scripts" / "lib" / "checks" / "matrix.py"
    done = subprocess.run([sys.executable, matrix, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run scripts/check matrix, or write its table anew: {done.stderr}"


def test_the_image_is_made_by_what_is_here() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    for script in re.findall(r"scripts/\w+", text):
        assert os.access(ROOT / script, os.X_OK), script
    for example in re.findall(r"examples/\w+\.py", text):
        assert (ROOT / example).is_file(), example
    assert (ROOT / ".dockerignore").is_file(), ".venv of a checkout would be copied"


def test_every_requirement_is_locked_to_a_version_that_fits() -> None:
    """What goes into an environment of its own, "docs", is pinned in setup.cfg itself."""
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
