"""The measurement runs anywhere, checks what it measures, and says so where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.local import device as bench_device


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    code = bench_device.main(
        ["--elements", "20000", "--repeat", "1", "--device", "cpu", "--density", "0.01", "--json", str(file)]
    )
    result = json.loads(file.read_text())
    assert code == 0
    assert result["selection_right"] is True
    names = [timing["name"] for timing in result["timings"]]
    assert names[0] == result["baseline"] == "copy"
    assert sum(name.startswith("step: ") for name in names) == 3
    assert all(timing["median_ms"] > 0 for timing in result["timings"])
    assert all(name in capsys.readouterr().out for name in names[:1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_device.main(["--elements", "1000"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_bench_local_hands_devices_over(tmp_path: Path) -> None:
    """In a process of its own, that Horovod is kept from."""
    file = tmp_path / "result.json"
    program = (
        "import sys; sys.modules['horovod'] = None\n"
        "from benchmarks.local import main as bench_local\n"
        "sys.exit(bench_local.main(sys.argv[1:]))"
    )
    arguments = ["--device", "cpu:0", "--elements", "5000", "--repeat", "1", "--density", "0.01"]
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(file.read_text())["device"] == "cpu"
