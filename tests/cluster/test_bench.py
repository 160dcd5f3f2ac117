"""`scripts/bench sync` and `train` at a small size, on a cluster of the test and on one of their own."""

import signal
import subprocess
import time
from pathlib import Path

from cluster.script import namespaces

_BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


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
