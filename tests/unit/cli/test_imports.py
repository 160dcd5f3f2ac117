"""Importing a command leaves the process as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import horovod_sparse

_SCRIPT = """
import importlib, json, os, sys
before = dict(os.environ)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(key for key in os.environ if os.environ[key] != before.get(key))))
"""


#: front ends set the last one, so that stock Horovod's collectives have a deadline, too
_ALLOWED = {"TF_CPP_MIN_LOG_LEVEL", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"}


def test_nothing_but_thread_counts_and_logging():
    """One of them once made every later test of the same process believe that it was elastic."""
    root = Path(horovod_sparse.__file__).parents[1]
    names = [
        str(path.relative_to(root).with_suffix("")).replace("/", ".")
        for folder in ("horovod_sparse/cli", "benchmarks")
        for path in sorted(root.glob(f"{folder}/**/*.py"))
        # what only the ranks of a launch import has a process of its own
        if path.stem != "__init__" and not path.stem.endswith("rank")
    ]
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *names], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    changed = json.loads(found.stdout.splitlines()[-1])
    assert not [key for key in changed if not key.endswith("_NUM_THREADS") and key not in _ALLOWED]
