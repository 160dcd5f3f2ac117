"""Running a measurement on hosts of `scripts/cluster`, which are made for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_sparse.errors import HorovodSparseError
from horovod_sparse.plans import TENSOR_SELECTION_VARIABLE

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = _ROOT / "scripts" / "cluster"
#: runs a rank of a module
_RANKS = "benchmarks.common.ranks"
#: what carries collectives
NETWORKS = ("gloo", "mpi")


class BenchmarkError(HorovodSparseError, RuntimeError):
    """A measurement failed; the message says why."""


@dataclass(frozen=True)
class Hosts:
    """A running cluster of simulated hosts.

    Attributes:
        name: of the cluster.
        rate: of its ports.
    """

    name: str
    rate: str

    def run(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        num_ranks: int,
        network: str = "gloo",
        timeout_s: float = 1800,
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> Any:
        """Runs a module on the hosts, whose optimizers sparsify all tensors, whether that can win or not.

        Args:
            module: whose `on_rank` is called with the settings on every rank.
            settings: plain values.
            num_ranks: spread over the hosts.
            network: one of `NETWORKS`.
            timeout_s: after which it is ended.
            on_progress: gets what rank 0 prints, line by line.

        Returns:
            What rank 0 wrote, read as JSON.

        Raises:
            BenchmarkError: if a rank failed, or the time was over.
        """
        with tempfile.TemporaryDirectory(prefix="horovod_sparse_bench") as folder:
            asked, answered = Path(folder) / "settings.json", Path(folder) / "result.json"
            asked.write_text(json.dumps(settings))
            paths = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
            launch = [str(_SCRIPT), "run", "--name", self.name, f"--{network}", "-np", str(num_ranks)]
            command = [sys.executable, "-m", _RANKS, module, str(asked), str(answered)]
            process = subprocess.Popen(
                [*launch, "--timeout", str(timeout_s), "--", *command],
                env={**os.environ, "PYTHONPATH": paths, TENSOR_SELECTION_VARIABLE: "all"},
                stdout=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
            )
            try:
                for line in process.stdout or ():
                    on_progress(line.rstrip("\n"))
                status = process.wait()
            except BaseException:
                process.terminate()  # the script ends the ranks before it ends itself
                process.wait()
                raise
            if status or not answered.exists():
                raise BenchmarkError(f"the ranks of {self.name} ended with exit code {status}; see above")
            return json.loads(answered.read_text())


def cluster_command(*arguments: str) -> None:
    """Runs `scripts/cluster`."""
    if not _SCRIPT.exists():
        raise BenchmarkError("scripts/cluster is not here: measure in a clone of horovod_sparse")
    command = [str(_SCRIPT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise BenchmarkError(f"scripts/cluster {' '.join(arguments)}: {result.stderr.strip()}")


@contextlib.contextmanager
def cluster_for(num_hosts: int, rate: str, latency: str = "0ms") -> Iterator[Hosts]:
    """Returns a context with a cluster of this many hosts, removed at its end.

    Args:
        num_hosts: it has.
        rate: of their ports.
        latency: that is added to every message of its hosts.

    Raises:
        BenchmarkError: if this machine permits no cluster.
    """
    name = f"bench-{os.getpid()}"
    with _ended_tidily():
        try:
            shape = "--hosts", str(num_hosts), "--rate", rate, "--latency", latency
            cluster_command("up", "--name", name, *shape)
            yield Hosts(name, rate)
        finally:
            cluster_command("down", "--name", name)


@contextlib.contextmanager
def _ended_tidily() -> Iterator[None]:
    """Returns a context in which SIGTERM and SIGHUP raise an exception, so that clusters are removed."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def machine_facts() -> dict[str, Any]:
    """Returns cores, memory and load, on which numbers depend, and nothing that names the machine."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30),
        "load_before": round(os.getloadavg()[0], 2),
    }
