"""`scripts/study time_to_accuracy` at toy size: ranks of this machine train, and are timed over loopback."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "study"
METHODS = ("dense", "dense, DDP", "topk", "PowerSGD")


@pytest.mark.nightly
def test_it_trains_times_and_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, drawn = tmp_path / "toy.json", tmp_path / "toy.png"
    size = ("--tiny", "--models", "digits", "--steps", "4", "--rates", "loopback", "--repeat", "2")
    command = [
        str(SCRIPT),
        "time_to_accuracy",
        *size,
        "--methods",
        *METHODS,
        "--json",
        str(file),
        "--picture",
        str(drawn),
    ]

    def launched(*seeds: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*command, "--seeds", *seeds],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=600,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done

    launched("0")
    first = json.loads(file.read_text())
    # dense training behind DDP takes the steps of dense training: it is timed only
    assert list(first["runs"]) == [f"digits/{name}/seed 0" for name in METHODS if name != "dense, DDP"]
    dense, topk, power = first["runs"].values()
    assert [step for step, _ in dense["curve"]] == [0, 4] and not topk["diverged"]
    assert dense["bytes_per_step"] == 4 * dense["num_parameters"]
    assert topk["bytes_per_step"] < 0.1 * dense["bytes_per_step"]
    assert 0.5 * dense["bytes_per_step"] < power["bytes_per_step"] < dense["bytes_per_step"]  # half is dense
    timed = first["timings"]["digits/loopback"]["methods"]
    assert list(timed) == list(METHODS)
    for item in timed.values():
        assert 0.0 < item["low"] <= item["median"] <= item["high"]
        assert set(item["parts"]) == {"forward", "backward", "exchange", "step", "other"}
    assert drawn.stat().st_size > 10_000

    text = launched("0").stdout  # nothing is left to do
    assert json.loads(file.read_text()) == first
    assert text.splitlines()[2].startswith("| dense |")
