"""Compiling: never at import, safe when ranks start together, and where the package is read-only."""

import fcntl
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import horovod_sparse

PACKAGE = Path(horovod_sparse.__file__).parent
TESTS = Path(__file__).parents[2]


def run(program, path=PACKAGE.parent, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=path,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip()


def test_importing_compiles_nothing_and_imports_no_framework():
    program = """
import sys
import horovod_sparse.kernels, horovod_sparse.arrays
from horovod_sparse.kernels.host.fold import fold_piece
from numba.core.registry import CPUDispatcher
compiled = [
    name
    for module in list(sys.modules.values()) if module.__name__.startswith("horovod_sparse.kernels")
    for name, value in vars(module).items() if isinstance(value, CPUDispatcher) and value.overloads
]
print(compiled, [name for name in ("torch", "tensorflow", "horovod", "ml_dtypes") if name in sys.modules])
"""
    assert finish(run(program)) == "[] []"


ONE_KERNEL = """
import numpy as np
from horovod_sparse.kernels.host.scatter import take_at
kind = np.{kind}
out = np.zeros(3, kind)
take_at(np.arange(9, dtype=kind), np.array([1, 3, 5], np.int32), out)
print(out.tolist(), sum(take_at.stats.cache_misses.values()))
"""


def test_ranks_that_start_together(tmp_path):
    kinds = ["float32", "float64"] * 2
    patient = "from horovod_sparse.kernels import compile\ncompile._MOST_SECONDS = 300.0\n"
    ranks = [run(patient + ONE_KERNEL.format(kind=kind), NUMBA_CACHE_DIR=str(tmp_path)) for kind in kinds]
    outs = [finish(rank) for rank in ranks]
    assert all(out.startswith("[1.0, 3.0, 5.0]") for out in outs)
    # Whoever comes first compiles, once per type; the others read.
    assert sum(int(out.split()[-1]) for out in outs) == 2
    assert finish(run(ONE_KERNEL.format(kind="float64"), NUMBA_CACHE_DIR=str(tmp_path))).endswith(" 0")


def test_a_lock_that_somebody_holds_ends_no_job(tmp_path):
    finish(run(ONE_KERNEL.format(kind="float32"), NUMBA_CACHE_DIR=str(tmp_path)))
    (lock,) = tmp_path.rglob("kernels.lock")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600, "another user could hold it"
    program = """
import logging
from horovod_sparse.kernels import compile
compile._QUIET_SECONDS, compile._MOST_SECONDS = 0.1, 1.0
logging.basicConfig(format="%(message)s")
""" + ONE_KERNEL.format(kind="float64")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = run(program, NUMBA_CACHE_DIR=str(tmp_path))
        out, err = process.communicate(timeout=300)
    assert out.startswith("[1.0, 3.0, 5.0]"), err
    assert "waiting for another process" in err and "all the same" in err


def test_a_change_in_a_file_that_is_used_makes_the_cache_stale(tmp_path):
    copy = tmp_path / "horovod_sparse"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert finish(run(ONE_KERNEL.format(kind="float32"), tmp_path)).endswith(" 1")
    assert finish(run(ONE_KERNEL.format(kind="float32"), tmp_path)).endswith(" 0")
    with (copy / "kernels" / "lanes.py").open("a") as file:
        file.write("# changed\n")
    assert finish(run(ONE_KERNEL.format(kind="float32"), tmp_path)).endswith(" 1")


@pytest.mark.nightly
def test_a_processor_without_avx512():
    program = f"""
import pytest, sys
from horovod_sparse.kernels import packing
assert not packing.PACKS
sys.exit(pytest.main(["-qq", "-p", "no:cacheprovider", {str(TESTS / "unit" / "arrays" / "test_host.py")!r}]))
"""
    # the cache key holds the processor, so this does not disturb what was compiled for the real one
    finish(run(program, NUMBA_CPU_NAME="generic", PYTHONPATH=str(PACKAGE.parent)))


def test_a_process_that_was_forked_meanwhile_holds_no_lock(tmp_path):
    """A worker of a DataLoader that lives on: other processes waited a minute for it."""
    program = f"""
import fcntl, os, signal
from horovod_sparse.kernels import compile
read, write = os.pipe()
with compile._cache_lock({str(tmp_path)!r}):
    child = os.fork()
    if not child:
        os.write(write, b"1")
        signal.pause()
os.read(read, 1)
with open({str(tmp_path / "kernels.lock")!r}) as lock:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
"""
    finish(run(program))
