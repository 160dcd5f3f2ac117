"""Commands that are killed leave nothing that `up` and `down` cannot clean."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.script import NAME, SCRIPT, cluster, namespaces, own_network, pids, status


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, f"in vain: waited for {what}"
        time.sleep(0.005)


def _sleepers(name: str) -> list[int]:
    found = [pid for index in range(2) for pid in pids(f"hvds-{name}-{index}")]
    return [pid for pid in found if _command(pid) == b"sleep\x00777\x00"]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    # An ended process keeps its entry until its parent has asked how it ended.
    return state != "Z"


def test_down_after_a_killed_run_ends_its_ranks_and_leaves_everything_as_before() -> None:
    name = f"{NAME}-k"
    links = own_network()
    cluster("up", "--hosts", "2", "--rate", "100mbit", "--name", name)
    run = subprocess.Popen([str(SCRIPT), "run", "--name", name, "--", "sleep", "777"])
    # setsid'ed processes are in nobody's group: only their namespace tells where they belong.
    stray = subprocess.Popen(
        [str(SCRIPT), "enter", "--name", name, "1", "--", "setsid", "sleep", "777"], start_new_session=True
    )
    try:
        _wait_until(lambda: len(_sleepers(name)) == 3, "two ranks and a stray process")
        victims = _sleepers(name)
        run.send_signal(signal.SIGKILL)
        run.wait()
    finally:
        cluster("down", "--name", name)
        stray.wait()
    assert [pid for pid in victims if _runs(pid)] == []
    assert [space for space in namespaces() if name in space] == []
    assert own_network() == links
    assert not Path(f"/run/horovod_sparse_cluster/{name}").exists()


@pytest.mark.nightly
def test_a_killed_up_is_cleaned_by_the_next_one() -> None:
    name = f"{NAME}-u"
    up = subprocess.Popen([str(SCRIPT), "up", "--hosts", "64", "--name", name], stderr=subprocess.DEVNULL)
    _wait_until(lambda: f"hvds-{name}-3" in namespaces(), "the fourth host")
    up.kill()
    up.wait()
    try:
        assert f"hvds-{name}-63" not in namespaces(), "`up` was done before it was killed"
        assert status(name)["complete"] is False
        assert cluster("run", "--name", name, "--", "true", check=False).returncode == 1
        assert "killed" in cluster("up", "--hosts", "2", "--name", name).stderr
        assert len([space for space in namespaces() if name in space]) == 3
    finally:
        cluster("down", "--name", name)
    assert [space for space in namespaces() if name in space] == []


# A signal that comes while a destructor runs: Python drops what its handler raises there.
_END_IN_DESTRUCTOR = """
import os, signal, sys
from cluster_lib import main, network

class Process:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

def add_namespace(name, add=network._add_namespace):
    add(name)
    Process()

network._add_namespace = add_namespace
sys.exit(main.main())
"""


def test_an_interruption_within_a_destructor_is_not_lost() -> None:
    name = f"{NAME}-d"
    command = [sys.executable, "-c", _END_IN_DESTRUCTOR, "up", "--hosts", "2", "--name", name]
    up = subprocess.run(command, cwd=SCRIPT.parent / "lib", capture_output=True, text=True)
    assert "Exception ignored" in up.stderr
    assert up.returncode == 128 + signal.SIGTERM
    assert [space for space in namespaces() if name in space] == []
