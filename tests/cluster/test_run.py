"""Ranks of Horovod on the hosts, how a run ends or is killed, the rate of hosts, and what is refused."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.script import NAME, SCRIPT, cluster, namespaces, own_network, pids, status
from support.jobs import is_alive

_RANK = Path(__file__).resolve().parent / "allreduce.py"
# Four bytes per element. No allreduce can do with less than 2 (P - 1) copies of them in all, and
# a ring needs no more; Open MPI takes others at times, and loads one host more than the next.
_LEAST_BYTES = 4 * 500_000 * 2 * (3 - 1)


def _processes(name: str) -> list[int]:
    return [pid for index in range(3) for pid in pids(f"hvds-{name}-{index}")]


def _mpi_here() -> bool:
    import horovod.torch as hvd

    return shutil.which("mpirun") is not None and hvd.mpi_built()


@pytest.mark.parametrize("kind", ["mpi", pytest.param("gloo", marks=pytest.mark.nightly)])
def test_allreduce_across_hosts(slow: str, kind: str) -> None:
    if kind == "mpi" and not _mpi_here():
        pytest.skip("Horovod here is built without MPI, or there is no mpirun")
    before = status(slow)["hosts"]
    result = cluster("run", "--name", slow, f"--{kind}", "--timeout", "200", "--", sys.executable, str(_RANK))
    after = status(slow)["hosts"]
    ranks = json.loads(result.stdout)
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    for index, rank in enumerate(ranks):
        assert rank["host"] == f"{slow}-{index}"
        assert rank["address"] == f"198.18.0.{index + 1}"
        assert (rank["size"], rank["local_size"], rank["cross_size"], rank["cross_rank"]) == (3, 1, 3, index)
        assert rank["smallest"] == rank["largest"] == 1 + 2 + 3
    sent = [now["tx_bytes"] - then["tx_bytes"] for then, now in zip(before, after, strict=True)]
    # Starting up and negotiating add some 100 kB. Ranks that took another way would send next to nothing.
    assert _LEAST_BYTES < sum(sent) < 1.3 * _LEAST_BYTES
    assert min(sent) > _LEAST_BYTES / 6
    assert _processes(slow) == []


def test_more_ranks_than_hosts_share_them_and_get_the_environment(slow: str) -> None:
    script = 'echo "$HOROVOD_RANK $HOSTNAME $HOROVOD_LOCAL_SIZE $OMP_NUM_THREADS $GREETING"'
    arguments = ["-np", "5", "--", "sh", "-c", script]
    first = cluster("run", "--name", slow, *arguments, GREETING="it's me").stdout
    logs = Path(f"/run/horovod_sparse_cluster/{slow}/logs")
    told = [first, *((logs / f"rank-{rank}.log").read_text() for rank in range(1, 5))]
    homes = [(0, 2), (0, 2), (1, 2), (1, 2), (2, 1)]
    expected = [
        f"{rank} {slow}-{host} {local_size} 1 it's me\n" for rank, (host, local_size) in enumerate(homes)
    ]
    assert told == expected


def test_a_failing_rank_ends_all_and_its_exit_code_comes_back(slow: str) -> None:
    script = 'test "$HOROVOD_RANK" != 1 || { echo the cause >&2; exit 7; }; sleep 100'
    result = cluster("run", "--name", slow, "--", "sh", "-c", script, check=False)
    assert result.returncode == 7
    assert "rank 1 was the first" in result.stderr
    assert "the cause" in result.stderr
    assert _processes(slow) == []


@pytest.mark.nightly
def test_the_rate_is_reached_and_not_exceeded(request: pytest.FixtureRequest) -> None:
    # A bucket holds 12 ms of 10 Mbit/s: a machine whose cores do other things for a moment loses less of it
    # than at a higher rate. Busy with other work it may miss the rate for a while, but never exceeds it.
    slower = f"{NAME}-slower"
    cluster("up", "--hosts", "3", "--rate", "10mbit", "--name", slower)
    request.addfinalizer(lambda: cluster("down", "--name", slower))
    asked, reached = 10e6, [0.0, 0.0]
    for _ in range(6):
        before = status(slower)["hosts"]
        results = json.loads(cluster("measure", "--name", slower, "--megabytes", "2").stdout)
        after = status(slower)["hosts"]
        rates = [result["slowest_bits_per_second"] for result in results]
        assert [result["transfers"] for result in results] == [1, 3]
        assert max(rates) < asked, results
        # The pair sends from host 0 to host 1, the ring from every host to the next.
        sent = [now["tx_bytes"] - then["tx_bytes"] for then, now in zip(before, after, strict=True)]
        received = [now["rx_bytes"] - then["rx_bytes"] for then, now in zip(before, after, strict=True)]
        assert sent == pytest.approx([4e6, 2e6, 2e6], rel=0.2)
        assert received == pytest.approx([2e6, 4e6, 2e6], rel=0.2)
        reached = [max(pair) for pair in zip(reached, rates, strict=True)]
        if min(reached) > 0.85 * asked:
            return
    pytest.fail(f"10 Mbit/s were asked for, and never reached: {reached}")


def test_latency_is_added_to_every_message(request: pytest.FixtureRequest) -> None:
    if shutil.which("iptables") is None:
        pytest.skip("without iptables no packet can be held back")
    late = f"{NAME}-late"
    cluster("up", "--hosts", "2", "--latency", "50ms", "--name", late)
    request.addfinalizer(lambda: cluster("down", "--name", late))
    connect = "TIMEFORMAT=%R; time (: </dev/tcp/198.18.0.2/9)"  # nobody listens there
    took = []
    while len(took) < 100 and (not took or took[-1] >= 0.2):  # a busy machine may take longer
        told = cluster("enter", "--name", late, "0", "--", "bash", "-c", connect, check=False).stderr
        assert "refused" in told
        took.append(float(told.split()[-1]))
    assert 0.1 <= min(took) < 0.2


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"in vain: waited for {what}"
        time.sleep(0.005)


def _sleepers(name: str) -> list[int]:
    found = [pid for index in range(2) for pid in pids(f"hvds-{name}-{index}")]
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in found}
    return [
        pid for pid, file in commands.items() if file.exists() and file.read_bytes() == b"sleep\x00777\x00"
    ]


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
    assert [pid for pid in victims if is_alive(pid)] == []
    assert [space for space in namespaces() if name in space] == []
    assert own_network() == links
    assert not Path(f"/run/horovod_sparse_cluster/{name}").exists()
