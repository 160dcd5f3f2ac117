"""The Triton kernels become machine code for GPUs, also where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

_PROGRAM = Path(__file__).with_name("compile_kernels.py")


@pytest.mark.nightly
def test_machine_code() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, _PROGRAM, "80", "90"], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    facts = [json.loads(line) for line in run.stdout.splitlines()]
    assert {fact["capability"] for fact in facts} == {80, 90}
    for fact in facts:
        # Contraction and flushing of subnormals would give other bits than the host. (A logarithm is a
        # polynomial, and promises no bits.)
        if fact["kernel"] != "_moments_kernel":
            assert fact["fused"] == fact["flushed"] == 0, fact
        assert fact["stack"] <= 16, fact  # registers suffice
    folds = [fact for fact in facts if fact["kernel"] == "_fold_kernel"]
    assert len(folds) == 16
    for fact in folds:
        assert fact["wide_loads"] >= 4, fact
        assert fact["wide_stores"] >= 4, fact
