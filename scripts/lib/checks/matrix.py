#!/usr/bin/env python3
"""Installs the package beside several versions of Python, PyTorch and TensorFlow, and tests it on two ranks.

It writes docs/measurements/matrix.json; scripts/report makes the table of docs/install.md of it.

Corners without Horovod install a wheel of this tree into an environment of their own, and run tests/ddp by
torchrun. The others run scripts/setup in a copy of this tree, and tests on ranks by horovodrun. A Python that
is missing is a corner left out: python3.10 and the like are looked for on PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "docs" / "measurements" / "matrix.json"


@dataclass(frozen=True)
class Corner:
    """A set of versions.

    Attributes:
        python: its version.
        torch: PyTorch's.
        tensorflow: its version, with Horovod; empty for PyTorch alone.
        horovod: whether Horovod is built, or `horovod_sparse.ddp` tested without it.
    """

    python: str
    torch: str
    tensorflow: str = ""
    horovod: bool = False


CORNERS = {
    "ddp-oldest": Corner("3.10", "2.3.1"),
    "ddp-middle": Corner("3.11", "2.6.0"),
    "ddp-newest": Corner("3.12", "2.15.0"),
    "ddp-python-3.13": Corner("3.13", "2.15.0"),
    "horovod-oldest": Corner("3.10", "2.3.1", "2.15", horovod=True),
    "horovod-usual": Corner("3.11", "2.13.0", "2.21", horovod=True),
    "horovod-newest": Corner("3.12", "2.15.0", "2.21", horovod=True),
    "horovod-torch": Corner("3.12", "2.15.0", horovod=True),
}


class CornerError(RuntimeError):
    """A corner that did not work."""


def run(command: Sequence[str | Path], folder: Path, seconds: float = 1800, **variables: str) -> str:
    """What a command printed.

    Raises:
        CornerError: if it failed, with the end of its words.
    """
    # neither another environment's packages nor this tree: what is installed is what is tested
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=seconds,
    )
    if done.returncode != 0:
        raise CornerError(f"{' '.join(map(str, command))}: {done.stdout[-1500:]}{done.stderr[-500:]}")
    return done.stdout


def passed(output: str) -> int:
    """How many tests pytest says it passed on the first rank that says so."""
    found = re.search(r"\b(\d+) passed", output)
    if found is None:
        raise CornerError(f"no test passed: {output[-500:]}")
    return int(found[1])


def copied(folder: Path) -> Path:
    """This tree as it is now, so that what is installed and what tests it are the same."""
    tree = folder / "tree"
    ignore = shutil.ignore_patterns(
        "__pycache__", ".venv", ".git", "site", "build", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, tree, ignore=ignore)
    return tree


def without_horovod(corner: Corner, python: str, folder: Path) -> tuple[Path, float, dict[str, int]]:
    """The environment's Python, seconds of installing, and tests that passed."""
    tree = copied(folder)
    started = time.monotonic()
    run([python, "-m", "venv", folder / "env"], folder)
    own = folder / "env" / "bin" / "python"
    run([own, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "wheel", tree], folder)
    (wheel,) = (folder / "wheel").glob("*.whl")
    install = [own, "-m", "pip", "install", "--quiet"]
    run([*install, f"{wheel}[torch]", f"torch=={corner.torch}", "pytest>=8.0"], folder)
    seconds = time.monotonic() - started
    # the tree's own package out of reach
    shutil.rmtree(tree / "horovod_sparse")
    launcher = [own.with_name("torchrun"), "--standalone", "--nproc-per-node", "2"]
    path = f"{own.parent}{os.pathsep}{os.environ['PATH']}"
    run([own, "-m", "horovod_sparse", "doctor", "--help"], tree, PATH=path)
    ranks = run([*launcher, "-m", "pytest", "-q", "-x", "tests/ddp"], tree, PATH=path)
    return own, seconds, {"tests/ddp": passed(ranks)}


def with_horovod(corner: Corner, python: str, folder: Path) -> tuple[Path, float, dict[str, int]]:
    """The same by scripts/setup."""
    tree = copied(folder)
    started = time.monotonic()
    versions = ["--torch", corner.torch]
    versions += ["--tensorflow", corner.tensorflow] if corner.tensorflow else ["--without-tensorflow"]
    run([tree / "scripts" / "setup", "--python", python, *versions], tree)
    seconds = time.monotonic() - started
    own = tree / ".venv" / "bin" / "python"
    path = f"{own.parent}{os.pathsep}{os.environ['PATH']}"
    found = {}
    tests = ["tests/ranks/torch/test_conformance.py", "tests/ranks/torch/test_transport.py"]
    for test in [*tests, *(["tests/ranks/tensorflow/test_keras.py"] if corner.tensorflow else [])]:
        launcher = [own.with_name("horovodrun"), "--gloo", "-np", "2"]
        found[test] = passed(run([*launcher, own, "-m", "pytest", "-q", "-x", test], tree, PATH=path))
    return own, seconds, found


def versions_of(python: Path, folder: Path) -> dict[str, str]:
    """What is installed there."""
    code = (
        "import json, platform; from importlib.metadata import distributions as d; "
        "v = {x.metadata['Name'].lower().replace('_', '-'): x.version for x in d()}; "
        "print(json.dumps({'python': platform.python_version(), **v}))"
    )
    found = json.loads(run([python, "-c", code], folder).splitlines()[-1])
    names = {"tensorflow-cpu": "tensorflow"}
    told = ("python", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy", "numba", "horovod")
    return {names.get(name, name): found[name].partition("+")[0] for name in told if name in found}


def measured(name: str, folder: Path) -> dict[str, Any] | None:
    """A corner's outcome; None where its Python is missing."""
    corner = CORNERS[name]
    python = shutil.which(f"python{corner.python}")
    usable = python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
    if not python or not usable:
        print(f"{name}: no python{corner.python} on PATH, left out", file=sys.stderr)
        return None
    print(f"{name}: {corner}", file=sys.stderr)
    started = time.monotonic()
    try:
        own, seconds, tests = (with_horovod if corner.horovod else without_horovod)(corner, python, folder)
    except (CornerError, subprocess.TimeoutExpired) as error:
        print(f"{name}: FAILED: {error}", file=sys.stderr)
        return {"versions": {"python": corner.python, "torch": corner.torch}, "failed": True}
    print(f"{name}: {tests}, {time.monotonic() - started:.0f} s", file=sys.stderr)
    return {"versions": versions_of(own, folder), "install_seconds": round(seconds), "passed": tests}


def main() -> int:
    """Runs what was asked for; the exit code is 1 where a corner failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/check matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corners", nargs="*", metavar="CORNER", help="which to run (default: all)")
    parser.add_argument("--list", action="store_true", help="name all corners and run none")
    options = parser.parse_args()
    if unknown := [name for name in options.corners if name not in CORNERS]:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(CORNERS)}")
    if options.list:
        for name, corner in CORNERS.items():
            print(name, corner)
        return 0
    result: dict[str, Any] = {"command": "scripts/check matrix", "corners": {}}
    if FILE.exists():
        result = json.loads(FILE.read_text())
    failed = False
    for name in options.corners or list(CORNERS):
        with tempfile.TemporaryDirectory(prefix="horovod_sparse_matrix.") as temporary:
            outcome = measured(name, Path(temporary))
        if outcome is not None:
            failed |= outcome.get("failed", False)
            result["corners"][name] = outcome
            ordered = {name: result["corners"][name] for name in CORNERS if name in result["corners"]}
            FILE.write_text(json.dumps({**result, "corners": ordered}, indent=1) + "\n")
            result["corners"] = ordered
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
