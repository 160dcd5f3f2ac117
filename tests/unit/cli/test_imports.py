"""Importing a command leaves the process as it was."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


_STEP = """
import os, sys
import horovod_sparse
root = os.path.dirname(horovod_sparse.__file__)

def loaded():
    files = [getattr(module, "__file__", None) or "" for module in sys.modules.values()]
    return sorted({file[len(root) + 1 :] for file in files if file.startswith(root)})

import horovod_sparse.torch as hvd
imported = loaded()
import torch
hvd.init()
model = torch.nn.Linear(3, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
    compression=hvd.Compression.topk(density=0.5),
)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
print(__import__("json").dumps([imported, loaded()]))
"""
#: of the package: what importing the front end loads is only ever to become less
_MOST_FILES = 121


def test_a_step_of_top_k_knows_no_planning_and_no_other_algorithm():
    pytest.importorskip("horovod.torch")
    found = subprocess.run([sys.executable, "-c", _STEP], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    imported, after = json.loads(found.stdout.splitlines()[-1])
    assert len(imported) <= _MOST_FILES, imported
    assert [file for file in after if file.startswith("planning")] == ["planning/__init__.py"]
    other = {"exdyna", "dgc", "oktopk", "gtopk", "sidco", "randomk", "qsgd", "dragonn"}
    assert not [file for file in after if file.removeprefix("sparsifiers/").removesuffix(".py") in other]
