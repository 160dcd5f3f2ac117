"""`scripts/bench sync` and `train` at a small size, on a cluster of the test and on one of their own."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.script import namespaces

_BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


def _bench(*arguments: str) -> dict[str, Any]:
    result = subprocess.run(
        [str(_BENCH), *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def _by_method(result: dict[str, Any]) -> dict[str, Any]:
    [launch] = result["launches"]
    return {item["method"]: item for item in launch["results"]}


@pytest.mark.nightly
@pytest.mark.parametrize("network", ["gloo", "mpi"])
def test_a_synchronization_on_a_running_cluster(slow: str, network: str) -> None:
    sparsifiers = "topk,exdyna"
    sizes = ("--hosts", "2", "--elements", "1e5", "--density", "0.01", "--repeat", "3")
    result = _bench("sync", "--name", slow, f"--{network}", "--sparsifiers", sparsifiers, *sizes)
    [launch] = result["launches"]
    assert (launch["ranks"], launch["rate"], launch["network"]) == (2, "100mbit", network)
    found = _by_method(result)
    assert list(found) == ["dense", "dense float16", "naive", "topk", "exdyna"]
    # of a 100 kB message, and of 400 kB at 100 Mbit/s, which take 32 ms at the very least
    assert found["dense"]["seconds"]["median"] > 0.025
    assert found["dense"]["bytes_sent"] == pytest.approx(400_000, rel=0.15)
    assert found["topk"]["bytes"]["wire_bytes"] == pytest.approx(8_000, rel=0.01)
    assert 8_000 < found["topk"]["bytes_sent"] < 60_000
    assert found["topk"]["facts"]["density_selected"] == pytest.approx(0.01)
    assert 0.01 < found["topk"]["facts"]["density_union"] <= 0.02
    for item in found.values():
        assert item["repetitions"] == 3
        assert 0 < item["own_cpu_seconds"]["median"] <= item["cpu_seconds"]["median"]
        assert sum(item["parts"].values()) <= 1.01 * item["seconds"]["high"] + 0.01


def test_a_measurement_that_is_ended_leaves_no_cluster() -> None:
    before = namespaces()
    arguments = ("sync", "--hosts", "2", "--elements", "1e5", "--repeat", "1000", "--name", "no-such")
    process = subprocess.Popen([str(_BENCH), *arguments], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        own = f"hvds-bench-{process.pid}-0"
        while own not in namespaces() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert own in namespaces()
        time.sleep(2.0)  # ranks are starting by now
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert namespaces() == before
