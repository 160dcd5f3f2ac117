"""Running ranks on the hosts of a cluster: start, watch, end, and report what failed.

The launcher itself (mpirun, or Horovod's own for Gloo) runs on the first host, because the
machine's own namespace has no way into a cluster.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from cluster_lib.network import RUN_MARK, end_processes, processes
from cluster_lib.record import INTERFACE, SUBNET, Cluster, locked
from cluster_lib.system import ClusterError
from cluster_lib.system import run as run_command

HERE = Path(__file__).resolve().parent
# One thread per rank, unless the caller's environment says otherwise: the ranks share the cores.
_THREADS = dict.fromkeys(
    [
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"),
        *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
    ],
    "1",
)

_TAIL_LINES = 20
# What a rank says when another one is the cause.
_CONSEQUENCES = ("Horovod has been shut down", "Connection reset by peer", "Connection closed by peer")


def slots(cluster: Cluster, num_ranks: int) -> list[tuple[str, int]]:
    """Return each host and its number of ranks: neighbours share a host, and hosts differ by at most 1.

    Hosts without a rank are left out.
    """
    each, more = divmod(num_ranks, cluster.num_hosts)
    counts = [each + (index < more) for index in range(cluster.num_hosts)]
    return [(host, count) for host, count in zip(cluster.hosts, counts, strict=True) if count]


def mpi_command(cluster: Cluster, num_ranks: int, command: list[str]) -> list[str]:
    """Return the mpirun command that starts `command` on the hosts.

    Raises:
        ClusterError: there is no mpirun, or not one of Open MPI 4.
    """
    if shutil.which("mpirun") is None:
        raise ClusterError("there is no mpirun here", "Install Open MPI, or use --gloo.")
    version = run_command("mpirun", "--version").split("\n")[0]
    if not re.search(r"Open MPI\) 4\.", version):
        raise ClusterError(f"--mpi needs Open MPI 4, and this is {version}", "Use --gloo.")
    source = '. "$0/common.sh" && . "$0/launch.sh" && mpirun_options'
    options = run_command("bash", "-c", source, str(HERE.parent)).split()
    parameters = {
        "plm_rsh_agent": str(HERE / "rsh_agent"),
        "plm_rsh_no_tree_spawn": "1",
        # The hosts share this machine's memory; only what goes over the switch may be used.
        "btl": "tcp,self",
        "pml": "ob1",
        "btl_tcp_if_include": SUBNET,
        "oob_tcp_if_include": SUBNET,
        # A killed mpirun leaves its session there, and `down` removes it.
        "orte_tmpdir_base": str(cluster.scratch),
    }
    for name, value in parameters.items():
        options += ["--mca", name, value]
    places = ",".join(f"{host}:{count}" for host, count in slots(cluster, num_ranks))
    return ["mpirun", *options, "-np", str(num_ranks), "--host", places, *command]


def gloo_command(cluster: Cluster, num_ranks: int, command: list[str]) -> list[str]:
    """Return the command of Horovod's launcher for Gloo, which enters a host's namespace instead of ssh."""
    python = shutil.which("python") or shutil.which("python3") or sys.executable
    places = ",".join(f"{host}:{count}" for host, count in slots(cluster, num_ranks))
    return [python, str(HERE / "gloo.py"), cluster.address(0), INTERFACE, str(num_ranks), places, *command]


def run(cluster: Cluster, kind: str, num_ranks: int, command: list[str], timeout_s: float | None) -> int:
    """Run `command` as `num_ranks` ranks; the exit code of the first that failed, 124 after a timeout.

    Ranks get the caller's environment. However this returns, no process of the run is left on the hosts.
    """
    if num_ranks < 1:
        raise ClusterError(f"-np {num_ranks} is out of range", "Allowed: 1 and more.")
    rank_command = ["bash", str(HERE / "one_rank.sh"), str(cluster.logs), *command]
    make = {"mpi": mpi_command, "gloo": gloo_command}[kind]
    launcher = make(cluster, num_ranks, rank_command)
    variables = {**_THREADS, **os.environ, RUN_MARK: cluster.name}
    busy = f"cluster {cluster.name!r} is busy with another run"
    with locked(cluster.folder / "run.lock", busy):
        # A killed run cannot have ended its ranks.
        if left := end_processes(cluster, of_run=True):
            print(f"ended {left} processes that a killed run had left", file=sys.stderr)
        for folder in (cluster.logs, cluster.scratch):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        status = _watch(cluster, launcher, variables, timeout_s)
    if status:
        _report(cluster.logs, status, timeout_s)
    return status


def _watch(
    cluster: Cluster, launcher: list[str], variables: Mapping[str, str], timeout_s: float | None
) -> int:
    """Run the launcher on the first host until it ends, its time is over or a signal comes."""

    def interrupt(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.signal(number, interrupt) for number in signals}
    process = None
    try:
        # The launcher learns by a signal when this process is killed; in a session of its own it
        # does not get the terminal's Ctrl-C beside ours.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", str(HERE / "enter"), cluster.host(0), *launcher],
            stdin=subprocess.DEVNULL,
            env=dict(variables),
            start_new_session=True,
        )
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        status = 124
    except SystemExit as asked:
        status = int(asked.code or 0)
    finally:
        # From here on nothing interrupts; the rest takes seconds at most.
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        _end(cluster, process)
        for number in signals:
            signal.signal(number, before[number])
    return 128 - status if status < 0 else status


def _end(cluster: Cluster, process: subprocess.Popen[bytes] | None) -> None:
    if process is not None and process.poll() is None:
        # mpirun and Horovod's launcher end their ranks themselves, which is the tidy way.
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    # The last lines of a rank may still be on their way through a pipe.
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline and processes(cluster, of_run=True):
        time.sleep(0.02)
    end_processes(cluster, of_run=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(logs: Path, status: int, timeout_s: float | None) -> None:
    """Say how the run ended, and the last words of the ranks that the terminal has not seen."""
    failed = [path.read_text().split() for path in logs.glob("rank-*.failed")]
    codes = {int(rank): code for _, rank, code in sorted(failed)}
    ends = {int(path.stem.partition("-")[2]): _end_of(path) for path in sorted(logs.glob("rank-*.log"))}
    shown = sorted(ends)
    if status == 124 and timeout_s is not None:
        _say(f"cluster: not done after {timeout_s:g} s, and ended")
    elif codes:
        first, *others = codes
        also = f"; so did {', '.join(f'{rank} ({codes[rank]})' for rank in others)}" if others else ""
        _say(f"cluster: rank {first} was the first to end with a failure, exit code {codes[first]}{also}")
        # a rank that raises shuts Horovod down on its way out, which is all that others have to say
        own = [rank for rank in shown if not any(sign in ends[rank] for sign in _CONSEQUENCES)]
        shown = [rank for rank in own if rank in codes or "Error" in ends[rank]] or [first]
    elif status > 128:
        _say(f"cluster: ended by {signal.Signals(status - 128).name}")
        return
    else:
        _say(f"cluster: the launch failed with exit code {status}")
    for rank in shown:
        if ends.get(rank):
            _say(f"--- rank {rank}, the end of {logs}/rank-{rank}.log\n{ends[rank]}")


def _end_of(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
