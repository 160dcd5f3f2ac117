"""A network that fails for a while, or loses packets: training waits, and goes on bit for bit."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.script import NAME, SCRIPT, cluster
from cluster.test_run import _mpi_here
from support.jobs import entries_in, of

_WORKER = Path(__file__).resolve().parents[1] / "faults" / "worker.py"
_HOSTS, _LAST_STEP, _DOWN_SECONDS, _LOST = 3, 11, 5.0, 0.02


def _entries(folder: Path, rank: int, what: str) -> dict[int, str]:
    return {entry["step"]: entry["digest"] for entry in of(entries_in(folder), what, rank=rank)}


def _until(run: Any, folder: Path, what: str, step: int, seconds: float = 300.0) -> None:
    begun = time.monotonic()
    while step not in _entries(folder, 0, what):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < begun + seconds, f"step {step} of {what} did not come"
        time.sleep(0.05)


@pytest.mark.nightly  # it is TCP that sends again, and a rank that is stopped is tested by day
@pytest.mark.parametrize("kind", ["gloo", "mpi"])
def test_a_link_that_is_down_and_one_that_loses_packets(kind: str, tmp_path: Path) -> None:
    if kind == "mpi" and not _mpi_here():
        pytest.skip("Horovod here is built without MPI, or there is no mpirun")
    name = f"{NAME}-f"

    def on_host(*command: str) -> str:
        return cluster("enter", "--name", name, "1", "--", *command).stdout

    can_lose = shutil.which("iptables") is not None
    cluster("up", "--hosts", str(_HOSTS), "--rate", "100mbit", "--name", name)
    command = [sys.executable, str(_WORKER), "networked", str(tmp_path)]
    more = ["--timeout", "900"]
    run = subprocess.Popen(
        [str(SCRIPT), "run", "--name", name, f"--{kind}", *more, "--", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        _until(run, tmp_path, "down", 3)
        on_host("ip", "link", "set", "eth0", "down")
        time.sleep(_DOWN_SECONDS)
        steps = len(_entries(tmp_path, 0, "down"))
        assert steps < _LAST_STEP, "nobody goes on without the others"
        on_host("ip", "link", "set", "eth0", "up")
        _until(run, tmp_path, "down", _LAST_STEP)

        lose = ["INPUT", "-i", "eth0", "-m", "statistic", "--mode", "random", "--probability", str(_LOST)]
        if can_lose:
            on_host("iptables", "-A", *lose, "-j", "DROP")
        _until(run, tmp_path, "lossy", _LAST_STEP)
        if can_lose:
            lost = on_host("iptables", "-L", "INPUT", "-v", "-x", "-n").splitlines()[2].split()[0]
            assert int(lost) > 0
        assert run.wait(300) == 0
    finally:
        run.kill()
        run.communicate()
        cluster("down", "--name", name)
    plain = _entries(tmp_path, 0, "plain")
    assert sorted(plain) == list(range(_LAST_STEP + 1))
    for rank in range(_HOSTS):
        for what in ("plain", "down", "lossy"):
            told = _entries(tmp_path, rank, what)
            own = told if what == "plain" else _entries(tmp_path, rank, "plain")
            assert told == own, f"rank {rank}: {what}"
    if not can_lose:
        pytest.skip("the link that was down is tested; without iptables no packet can be lost on purpose")
