"""The examples, for an epoch each, on two ranks: dense and sparse, as a user would copy them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
KERAS = pytest.param("tensorflow2_keras_mnist", marks=pytest.mark.tensorflow)


@pytest.mark.parametrize("compression", ["none", "exdyna:density=0.05"])
@pytest.mark.parametrize("example", ["pytorch_mnist", "ddp_digits", KERAS])
def test_it_learns_and_tells_its_bytes(example: str, compression: str, tmp_path: Path) -> None:
    if example.startswith("tensorflow"):
        pytest.importorskip("tensorflow")
    launcher = ["horovodrun", "--gloo", "--disable-cache", "-np", "2", sys.executable]
    if example == "ddp_digits":
        launcher = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    launcher[0] = str(Path(sys.executable).with_name(launcher[0]))
    file = tmp_path / "run.json"
    command = [str(EXAMPLES / f"{example}.py"), "--compression", compression, "--epochs", "1"]
    done = subprocess.run(
        [*launcher, *command, "--json", str(file)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    run = json.loads(file.read_text())
    assert run["accuracy"] > 0.5
    dense_bytes = 4 * run["num_parameters"]
    if compression == "none":
        assert run["bytes_per_step"] == dense_bytes
    else:
        assert run["bytes_per_step"] < dense_bytes / 2
