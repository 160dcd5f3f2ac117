"""Importing a command leaves the process as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import horovod_sparse.cli

_SCRIPT = """
import importlib, json, os, sys
before = dict(os.environ)
for name in sys.argv[1:]:
    importlib.import_module("horovod_sparse.cli." + name)
print(json.dumps(sorted(key for key in os.environ if os.environ[key] != before.get(key))))
"""


def test_nothing_but_thread_counts_and_logging():
    """One of them once made every later test of the same process believe that it was elastic."""
    folder = Path(horovod_sparse.cli.__file__).parent
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *names], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    changed = json.loads(found.stdout.splitlines()[-1])
    assert not [key for key in changed if not key.endswith("_NUM_THREADS") and key != "TF_CPP_MIN_LOG_LEVEL"]
