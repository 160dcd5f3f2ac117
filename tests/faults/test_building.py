"""One rank cannot make its optimizer, since an argument is misspelt: the others hear of it, by its words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.startup import HOROVODRUN

WORKER = Path(__file__).with_name("building_worker.py")
SECONDS = 20.0


#: by day; nights have every framework in every way
BY_DAY = (("torch", "raised"), ("keras", "variable"))
CASES = [
    pytest.param(
        framework,
        way,
        marks=[
            *([] if framework == "torch" else [pytest.mark.tensorflow]),
            *([] if (framework, way) in BY_DAY else [pytest.mark.nightly]),
        ],
    )
    for framework in ("torch", "tape", "keras")
    for way in ("raised", "caught", "variable")
]


@pytest.mark.parametrize(("framework", "way"), CASES)
def test_the_others_raise_what_one_rank_has_met(tmp_path: Path, framework: str, way: str) -> None:
    command = [*HOROVODRUN, "-np", "2", sys.executable, str(WORKER), framework, way, str(tmp_path)]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ended = subprocess.run(command, timeout=150, text=True, check=False, **quiet)  # type: ignore[call-overload]
    found = [tmp_path / f"rank-{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in found), ended.stdout[-3000:]
    other, own = (json.loads(path.read_text()) for path in found)
    assert own["type"] == "UnknownNameError"
    assert other["type"] in ("HorovodSparseError", "ArgumentError")
    what = "HOROVOD_SPARSE_TRANSPORT 'mpi'" if way == "variable" else "argument of topk 'densty'"
    assert other["text"].startswith(f"on rank 1: UnknownNameError: unknown {what}")
    assert other["seconds"] < SECONDS
    assert (ended.returncode == 0) == (way != "raised")
