"""What the doctor looks at on a rank, plain values that travel, and the form of what it finds."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from horovod_sparse.carriers.shared_memory import why_not_shared
from horovod_sparse.cli.console import is_launched, show
from horovod_sparse.cli.ranks import Ranks, bindings
from horovod_sparse.collectives import AllGather, Synchronization
from horovod_sparse.errors import ArgumentError
from horovod_sparse.planning.calibration.collectives import Stopwatch
from horovod_sparse.training.deadline import seconds_of_horovod
from horovod_sparse.training.host_topology import own_place

_PACKAGES = (
    "horovod-sparse",
    "horovod",
    "torch",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "tf-keras",
    "numpy",
    "numba",
    "scipy",
    "mpi4py",
    "triton",
)
#: what the doctor knows of Horovod's variables (and of ours)
SETTINGS = (
    "HOROVOD_AUTOTUNE",
    "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_CYCLE_TIME",
    "HOROVOD_DYNAMIC_PROCESS_SETS",
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_LOG_LEVEL",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_SPARSE_CHECK_EVERY",
    "HOROVOD_SPARSE_DEADLINE_SECONDS",
    "HOROVOD_SPARSE_ON_DRIFT",
    "HOROVOD_SPARSE_RANKS_PER_HOST",
    "HOROVOD_SPARSE_SHARED_MEMORY",
    "HOROVOD_SPARSE_TENSOR_SELECTION",
    "HOROVOD_SPARSE_TRANSPORT",
    "HOROVOD_STALL_CHECK_DISABLE",
    "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "HOROVOD_THREAD_AFFINITY",
    "HOROVOD_TIMELINE",
    "HOROVOD_TIMELINE_MARK_CYCLES",
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
_REPETITIONS = 25
#: Horovod's own default
_CYCLE_MS = 1.0


def local_facts() -> dict[str, Any]:
    """What a process can tell without Horovod running."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "packages": packages,
        "bindings": bindings(),
        "launched": is_launched(),
        "settings": {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")},
        # what horovod_sparse sets when it is imported, where nothing else is said
        "gives_up": seconds_of_horovod(),
        "threads": {name: os.environ[name] for name in _THREADS if name in os.environ},
        # launchers bind ranks to cores; who shares them is known by host, whose name need not travel
        "affinity": sorted(os.sched_getaffinity(0)),
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
        "numba": _numba(),
        "triton": importlib.util.find_spec("triton") is not None,
    }


def _numba() -> str | None:
    """Why the kernels of the host cannot run; None if they can."""
    try:
        kernels = importlib.import_module("horovod_sparse.kernels")
        array = np.array([1.0, -3.0, 2.0], np.float32)
        accumulator = importlib.import_module("horovod_sparse.arrays").HostAccumulator(3, density=1.0)
        accumulator.fold(array)
        found = accumulator.largest(1).tolist()
    except Exception as error:  # whatever it is, it is the finding
        return f"{type(error).__name__}: {error}"
    del kernels
    return None if found == [1] else f"the largest of [1, -3, 2] was found at {found}"


def build_facts(framework: str) -> dict[str, Any]:
    """What Horovod was built with, and what the framework has; Horovod need not run."""
    hvd = importlib.import_module(f"horovod_sparse.{framework}")
    facts: dict[str, Any] = {
        "rank": 0,
        "size": 1,
        "local_size": 1,
        "framework": framework,
        "controller": None,
        "built": {
            name: bool(getattr(hvd, f"{name}_built")())
            for name in ("mpi", "gloo", "nccl", "ddl", "ccl", "cuda", "rocm")
        },
        "mpi_threads": None,
        "thread_level": None,
        "cuda": None,  # with TensorFlow selection is on the host
        "latency_seconds": None,
        "no_shared_memory": "",
    }
    if framework == "torch":
        torch = importlib.import_module("torch")
        facts["framework_threads"] = int(torch.get_num_threads())
        facts["cuda"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    else:
        tensorflow = importlib.import_module("tensorflow")
        asked = int(tensorflow.config.threading.get_intra_op_parallelism_threads())
        facts["framework_threads"] = asked or os.cpu_count() or 1
    return facts


def rank_facts(ranks: Ranks) -> dict[str, Any]:
    """What a rank of a launch can tell besides; a collective: all ranks call it."""
    facts = build_facts(ranks.framework)
    facts |= {"rank": ranks.rank, "size": ranks.size, "local_size": int(ranks.hvd.local_size())}
    facts["controller"] = "mpi" if ranks.hvd.mpi_enabled() else "gloo"
    if facts["controller"] == "mpi":
        facts["mpi_threads"] = bool(ranks.hvd.mpi_threads_supported())
        facts["thread_level"] = _thread_level()
    if ranks.size > 1:
        facts["latency_seconds"] = ranks.carry_out(latency_of(ranks))
        facts["no_shared_memory"] = ranks.carry_out(why_not_shared(own_place(ranks.place)[0]))
    return facts


def _thread_level() -> str | None:
    """What mpi4py found MPI to be initialized with; None without mpi4py."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    mpi = importlib.import_module("mpi4py.MPI")
    levels = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    return levels.get(mpi.Query_thread(), "unknown")


def latency_of(ranks: Ranks) -> Synchronization[float]:
    """Median seconds of an allgather of one word, begun anywhere in a cycle; the same on all ranks."""
    cycle_ms = cycle_of(os.environ) or 0.0  # what is no number is a finding, not an error
    watch = Stopwatch(ranks.rank, ranks.size, time.perf_counter, time.sleep, 1e-3 * cycle_ms)
    own = []
    for _ in range(_REPETITIONS):
        yield from watch.meet()
        started = time.perf_counter()
        yield AllGather(np.zeros(1, np.int32))
        own.append(time.perf_counter() - started)
    shared = yield from watch.shared(own)
    return float(median(shared.tolist()))


def cycle_of(settings: Mapping[str, str]) -> float | None:
    """HOROVOD_CYCLE_TIME in milliseconds; None if it is no number.

    Example:
        >>> cycle_of({}), cycle_of({"HOROVOD_CYCLE_TIME": "0.1"}), cycle_of({"HOROVOD_CYCLE_TIME": "fast"})
        (1.0, 0.1, None)
    """
    try:
        value = float(settings.get("HOROVOD_CYCLE_TIME", _CYCLE_MS))
    except ValueError:
        return None
    return value if 0.0 <= value < float("inf") else None


#: from bad to good, with the sign and the style of each
LEVELS = {"problem": ("x", "bold red"), "advice": ("!", "yellow"), "good": ("+", "green")}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: "problem" (something fails, or is slow for no reason), "advice" or "good".
        topic: a word or two: "cycle time".
        what: was found.
        why: it matters; empty for what is good.
        do: what to do; likewise.
    """

    level: str
    topic: str
    what: str
    why: str = ""
    do: str = ""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ArgumentError("level", self.level, f"one of {', '.join(LEVELS)}")
        if self.level != "good" and not (self.why and self.do):
            raise ArgumentError("why and do", (self.why, self.do), "both, for what is not good")


def good(topic: str, what: str) -> Finding:
    """What is as it should be."""
    return Finding("good", topic, what)


def advice(topic: str, what: str, why: str, do: str) -> Finding:
    """What could be better."""
    return Finding("advice", topic, what, why, do)


def problem(topic: str, what: str, why: str, do: str) -> Finding:
    """What is wrong."""
    return Finding("problem", topic, what, why, do)


def print_findings(to: Console, findings: Iterable[Finding]) -> None:
    """Problems first, then advice, then what is good; each with its reason and remedy."""
    found = sorted(findings, key=lambda finding: list(LEVELS).index(finding.level))
    for finding in found:
        sign, style = LEVELS[finding.level]
        show(to, f"{sign} {finding.topic}: {finding.what}", style)
        if finding.why:
            show(to, f"    why  {finding.why}")
            show(to, f"    do   {finding.do}")
    counts = {level: sum(finding.level == level for finding in found) for level in LEVELS}
    problems, advised = counts["problem"], counts["advice"]
    text = f"{problems} problem{'' if problems == 1 else 's'}, {advised} piece{'' if advised == 1 else 's'}"
    show(to, f"{text} of advice, {counts['good']} good", "bold")
