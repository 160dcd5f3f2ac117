"""Running a measurement on the hosts of `scripts/cluster`, on a running cluster or on one of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod_sparse.errors import HorovodSparseError

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = _ROOT / "scripts" / "cluster"


class BenchmarkError(HorovodSparseError, RuntimeError):
    """A measurement could not be made."""


@dataclass(frozen=True)
class Network:
    """How ranks are launched and what carries their collectives.

    Attributes:
        name: as it stands in results.
        option: of `scripts/cluster run`.
        variables: environment of every rank.
    """

    name: str
    option: str
    variables: Mapping[str, str] = field(default_factory=dict)


#: rate of ranks that are on one host
LOOPBACK = "loopback"

_RING = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}

#: Open MPI's own choice for a large allreduce takes about twice as long as a ring: both are measured.
NETWORKS = {
    "gloo": Network("gloo", "--gloo"),
    "mpi": Network("mpi", "--mpi"),
    "mpi-ring": Network("mpi-ring", "--mpi", _RING),
}


@dataclass(frozen=True)
class Hosts:
    """A cluster that is up.

    Attributes:
        name: of the cluster.
        num_hosts: it has.
        rate: of its ports.
    """

    name: str
    num_hosts: int
    rate: str

    def run(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        num_ranks: int,
        network: Network,
        variables: Mapping[str, str],
        timeout_s: float,
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> Any:
        """Runs a module on the hosts, one rank each.

        Args:
            module: started with two arguments, the file that holds `settings` and the one for its result.
            settings: plain values.
            num_ranks: at most one per host.
            network: what carries collectives.
            variables: environment of every rank, beside the network's.
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
            given = {"PYTHONPATH": paths, **network.variables, **variables}
            options = [word for name, value in given.items() for word in ("-x", f"{name}={value}")]
            command = [sys.executable, "-m", module, str(asked), str(answered)]
            process = subprocess.Popen(
                self._launching(num_ranks, network, options, timeout_s) + command,
                env={**os.environ, **given},
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

    def _launching(
        self, num_ranks: int, network: Network, options: Sequence[str], timeout_s: float
    ) -> list[str]:
        """What stands before the command of a rank; `options` give variables to all ranks."""
        run = [str(_SCRIPT), "run", "--name", self.name, network.option, "-np", str(num_ranks)]
        return [*run, "--timeout", str(timeout_s), *options, "--"]


@dataclass(frozen=True)
class ThisMachine(Hosts):
    """Ranks side by side, without any network between them."""

    def _launching(
        self, num_ranks: int, network: Network, options: Sequence[str], timeout_s: float
    ) -> list[str]:
        folder, ended = Path(sys.executable).parent, ["timeout", "--kill-after=10", str(timeout_s)]
        if network.option == "--gloo":
            return [*ended, str(folder / "horovodrun"), "--gloo", "--disable-cache", "-np", str(num_ranks)]
        yields = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        return [*ended, "mpirun", *root, *yields, "-np", str(num_ranks), *options]


def _script(*arguments: str) -> str:
    if not _SCRIPT.exists():
        raise BenchmarkError("scripts/cluster is not here: measure in a clone of horovod_sparse")
    result = subprocess.run(
        [str(_SCRIPT), *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if result.returncode:
        raise BenchmarkError(f"scripts/cluster {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


@contextlib.contextmanager
def cluster_for(num_hosts: int | None, rate: str | None, name: str = "cluster") -> Iterator[Hosts]:
    """A cluster of so many hosts: the running one of that name where it fits, else one for this time only.

    Args:
        num_hosts: at least so many; None takes what the running one has, 8 without one.
        rate: of their ports; None takes what the running one has, 1gbit without one. "loopback": no
            hosts, but ranks side by side on this machine.
        name: of the cluster to look for.

    Raises:
        BenchmarkError: if this machine permits no cluster.
    """
    if rate == LOOPBACK:
        yield ThisMachine("this machine", num_hosts or 2, rate)
        return
    running = {item["name"]: item for item in json.loads(_script("status", "--json"))}
    found = running.get(name)
    if found is not None and len(found["hosts"]) >= (num_hosts or 2) and rate in (None, found["rate"]):
        yield Hosts(name, len(found["hosts"]), found["rate"])
        return
    own, rate, num_hosts = f"bench-{os.getpid()}", rate or "1gbit", num_hosts or 8
    with _ended_tidily():
        try:
            _script("up", "--name", own, "--hosts", str(num_hosts), "--rate", rate)
            yield Hosts(own, num_hosts, rate)
        finally:
            _script("down", "--name", own)


@contextlib.contextmanager
def _ended_tidily() -> Iterator[None]:
    """Whoever ends this process by SIGTERM or SIGHUP ends it as an exception would, clusters removed."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def machine_facts() -> dict[str, Any]:
    """Cores, memory and load: what a measurement's numbers depend on, and nothing that names the machine."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30),
        "load_before": round(os.getloadavg()[0], 2),
    }


def parts_of(items: Sequence[str], size: int) -> list[list[str]]:
    """Items in parts of at most `size`, of nearly equal length.

    Example:
        >>> parts_of(["a", "b", "c", "d"], 3)
        [['a', 'b'], ['c', 'd']]
    """
    count = -(-len(items) // max(1, size))
    return [
        list(items[number * len(items) // count : (number + 1) * len(items) // count])
        for number in range(count)
    ]


def write_json(result: Mapping[str, Any], target: str) -> None:
    """Writes a result.

    Args:
        result: plain values.
        target: a file, or "-" for stdout.
    """
    text = json.dumps(result, indent=1)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")
