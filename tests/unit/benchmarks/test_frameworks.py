"""`scripts/bench frameworks` measures both frameworks, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.tensorflow
def test_both_frameworks_are_measured(tmp_path) -> None:
    file = tmp_path / "frameworks.json"
    command = ["-m", "benchmarks.frameworks", "--elements", "20000", "--sparsifiers", "topk"]
    subprocess.run([sys.executable, *command, "--repeat", "2", "--json", str(file)], check=True, timeout=300)
    timings = json.loads(file.read_text())["timings"]
    assert [timing["name"] for timing in timings] == ["topk, PyTorch", "topk, TensorFlow"]
    assert all(timing["median_ms"] > 0 for timing in timings)
