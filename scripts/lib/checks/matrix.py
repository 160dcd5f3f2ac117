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
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "docs" / "measurements" / "matrix.json"
NOT_COPIED = ("__pycache__", ".venv", ".git", "site", "build", ".*_cache", ".hypothesis")
DDP = ["tests/ddp"]
HOROVOD = ["tests/ranks/torch/test_conformance.py", "tests/ranks/torch/test_transport.py"]
KERAS = "tests/ranks/tensorflow/test_keras.py"


class Corner(NamedTuple):
    """Versions; without TensorFlow's, if it is empty, and with Horovod, or `horovod_sparse.ddp` alone."""

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


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    """Returns what a command printed, or raises an error that says how it ended."""
    # neither another environment's packages nor this tree: what is installed is what is tested
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=1800,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout[-1500:]}{done.stderr[-500:]}")
    return done.stdout


def installed(corner: Corner, python: str, tree: Path) -> Path:
    """Installs the package of the tree with these versions; returns the environment's Python."""
    if corner.horovod:
        versions = ["--tensorflow", corner.tensorflow] if corner.tensorflow else ["--without-tensorflow"]
        run(tree / "scripts/setup", "--python", python, "--torch", corner.torch, *versions, folder=tree)
        return tree / ".venv" / "bin" / "python"
    run(python, "-m", "venv", "../env", folder=tree)
    own = tree.parent / "env" / "bin" / "python"
    pip = own, "-m", "pip"
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", "../wheel", tree, folder=tree)
    (wheel,) = (tree.parent / "wheel").glob("*.whl")
    run(*pip, "install", "--quiet", f"{wheel}[torch]", f"torch=={corner.torch}", "pytest>=8.0", folder=tree)
    shutil.rmtree(tree / "horovod_sparse")  # out of reach of what is tested
    return own


def tested(corner: Corner, own: Path, tree: Path) -> dict[str, int]:
    """Runs tests on two ranks; returns by file or folder how many passed on the first rank that says so."""
    path = {"PATH": f"{own.parent}{os.pathsep}{os.environ['PATH']}"}
    launcher: list[str | Path] = [own.with_name("torchrun"), "--standalone", "--nproc-per-node", "2"]
    if corner.horovod:
        launcher = [own.with_name("horovodrun"), "--gloo", "-np", "2", own]
    else:
        run(own, "-m", "horovod_sparse", "doctor", "--help", folder=tree, **path)
    found = {}
    for test in [*HOROVOD, *([KERAS] if corner.tensorflow else [])] if corner.horovod else DDP:
        output = run(*launcher, "-m", "pytest", "-q", "-x", test, folder=tree, **path)
        passed = re.search(r"\b(\d+) passed", output)
        if passed is None:
            raise RuntimeError(f"no test passed: {output[-500:]}")
        found[test] = int(passed[1])
    return found


def versions_of(python: Path, folder: Path) -> dict[str, str]:
    """Returns the versions of what is installed there."""
    code = (
        "import json, platform; from importlib.metadata import distributions as d; "
        "v = {x.metadata['Name'].lower().replace('_', '-'): x.version for x in d()}; "
        "print(json.dumps({'python': platform.python_version(), **v}))"
    )
    found = json.loads(run(python, "-c", code, folder=folder).splitlines()[-1])
    names = {"tensorflow-cpu": "tensorflow"}
    told = ("python", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy", "numba", "horovod")
    return {names.get(name, name): found[name].partition("+")[0] for name in told if name in found}


def measured(name: str, folder: Path) -> dict[str, Any] | None:
    """Returns a corner's outcome, or None where its Python is missing."""
    corner = CORNERS[name]
    python = shutil.which(f"python{corner.python}")
    if not python or subprocess.run([python, "-c", ""], capture_output=True).returncode != 0:
        print(f"{name}: no python{corner.python} on PATH, left out", file=sys.stderr)
        return None
    print(f"{name}: {corner}", file=sys.stderr)
    tree = shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*NOT_COPIED))
    started = time.monotonic()
    try:
        own = installed(corner, python, tree)
        seconds = time.monotonic() - started
        tests = tested(corner, own, tree)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"{name}: FAILED: {error}", file=sys.stderr)
        return {"versions": {"python": corner.python, "torch": corner.torch}, "failed": True}
    print(f"{name}: {tests}, {time.monotonic() - started:.0f} s", file=sys.stderr)
    return {"versions": versions_of(own, folder), "install_seconds": round(seconds), "passed": tests}


def main() -> int:
    """Runs what was asked for; the exit code is 1 where a corner failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/check matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "corners", nargs="*", metavar="CORNER", help=f"of {', '.join(CORNERS)} (default: all)"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.corners if name not in CORNERS]:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(CORNERS)}")
    found = json.loads(FILE.read_text())["corners"] if FILE.exists() else {}
    failed = False
    for name in options.corners or list(CORNERS):
        with tempfile.TemporaryDirectory(prefix="horovod_sparse_matrix.") as temporary:
            outcome = measured(name, Path(temporary))
        if outcome is not None:
            found[name], failed = outcome, failed or "failed" in outcome
            ordered = {one: found[one] for one in CORNERS if one in found}
            FILE.write_text(
                json.dumps({"command": "scripts/check matrix", "corners": ordered}, indent=1) + "\n"
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
