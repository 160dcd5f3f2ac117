"""What the doctor looks at on a rank: plain values, which ranks tell each other."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import numpy as np

from horovod_sparse.carriers.shared_memory import why_not_shared
from horovod_sparse.cli.console import is_launched
from horovod_sparse.cli.ranks import Ranks, bindings
from horovod_sparse.collectives import AllGather, Synchronization
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
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
_REPETITIONS = 25
#: Horovod's own default
_CYCLE_MS = 1.0


def local_facts() -> dict[str, Any]:
    """What a process can tell without Horovod; what Horovod tells besides has a default here."""
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
        "kernels": _why_no_kernels(),
        "triton": importlib.util.find_spec("triton") is not None,
        "rank": 0,
        "size": 1,
        "local_size": 1,
        "framework": "",
        "framework_threads": os.cpu_count() or 1,
        "cuda": None,  # with TensorFlow selection is on the host
        "built": {},
        "controller": None,
        "mpi_threads": None,
        "thread_level": None,
        "latency_seconds": None,
        "no_shared_memory": "",
    }


def _why_no_kernels() -> str:
    """Why the kernels of the host cannot run; empty if they can."""
    try:
        accumulator = importlib.import_module("horovod_sparse.arrays").HostAccumulator(3, density=1.0)
        accumulator.fold(np.array([1.0, -3.0, 2.0], np.float32))
        found = accumulator.largest(1).tolist()
    except Exception as error:  # whatever it is, it is the finding
        return f"{type(error).__name__}: {error}"
    return "" if found == [1] else f"the largest of [1, -3, 2] was found at {found}"


def framework_facts(framework: str) -> dict[str, Any]:
    """What a framework has, whether or not Horovod was built for it."""
    if framework == "torch":
        torch = importlib.import_module("torch")
        cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        return {"framework": framework, "framework_threads": int(torch.get_num_threads()), "cuda": cuda}
    tensorflow = importlib.import_module("tensorflow")
    threads = int(tensorflow.config.threading.get_intra_op_parallelism_threads())
    return {"framework": framework, "framework_threads": threads or os.cpu_count() or 1}


def build_facts(framework: str) -> dict[str, Any]:
    """What Horovod was built with; it need not run."""
    hvd = importlib.import_module(f"horovod_sparse.{framework}")
    kinds = ("mpi", "gloo", "nccl", "ddl", "ccl", "cuda", "rocm")
    built = {name: bool(getattr(hvd, f"{name}_built")()) for name in kinds}
    return {**framework_facts(framework), "built": built}


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
