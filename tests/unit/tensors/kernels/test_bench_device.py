"""The measurement runs anywhere, checks what it measures, and says so where there is no GPU."""

import json
from pathlib import Path

import pytest

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
