"""`scripts/bench drift` measures a step and the comparison after it, on real ranks."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_step_and_a_check_are_measured(tmp_path) -> None:
    file = tmp_path / "drift.json"
    command = [sys.executable, "-m", "benchmarks.drift", "--elements", "16000", "--repeat", "2"]
    subprocess.run([*command, "--json", str(file)], check=True, timeout=200)
    result = json.loads(file.read_text())
    assert result["ranks"] == 2
    assert result["compared_bytes"] == 3 * 4 * 16000
    assert 0 < result["share"] < 1
    assert all(result["ms"][name]["median"] > 0 for name in ("step", "check"))
