"""`horovod-sparse doctor`: looks at an installation, its settings, and a launch."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from horovod_sparse.carriers.mpi import TRANSPORT_VARIABLE, WAYS
from horovod_sparse.checks import whole_number
from horovod_sparse.cli.console import console, launcher, show
from horovod_sparse.cli.launch import FRAMEWORKS, Launch, bindings, start, usable_framework
from horovod_sparse.collectives import AllGather, Synchronization
from horovod_sparse.errors import HorovodMissingError
from horovod_sparse.planning.calibration.collectives import Stopwatch
from horovod_sparse.training.host_topology import RANKS_VARIABLE
from horovod_sparse.training.settings import EVERY_VARIABLE, POLICIES, POLICY_VARIABLE

Facts: TypeAlias = Mapping[str, Any]

_PACKAGES = "horovod-sparse horovod torch tensorflow tensorflow-cpu keras tf-keras numpy numba mpi4py triton"
#: variables that a misspelt one may mean, without "HOROVOD_"
_KNOWN = """
AUTOTUNE CACHE_CAPACITY CPU_OPERATIONS CYCLE_TIME DYNAMIC_PROCESS_SETS FUSION_THRESHOLD HIERARCHICAL_ALLGATHER
HIERARCHICAL_ALLREDUCE LOG_LEVEL NUM_NCCL_STREAMS SPARSE_CHECK_EVERY SPARSE_DEADLINE_SECONDS SPARSE_ON_DRIFT
SPARSE_RANKS_PER_HOST SPARSE_TENSOR_SELECTION SPARSE_TRANSPORT STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS
STALL_SHUTDOWN_TIME_SECONDS THREAD_AFFINITY TIMELINE TIMELINE_MARK_CYCLES
"""
SETTINGS = tuple(f"HOROVOD_{name}" for name in _KNOWN.split())
#: facts and settings whose difference makes ranks wait for each other
_STRICT = (
    *("HOROVOD_CACHE_CAPACITY", "HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_CPU_OPERATIONS", TRANSPORT_VARIABLE),
    *("python", "controller", "kernels"),
)
#: beginnings of what a launcher sets differently on every rank
_LAUNCHERS = "RANK SIZE HOSTNAME GLOO CONTROLLER SECRET RENDEZVOUS LOCAL CROSS JOB NUM_PROC"
_OF_LAUNCHERS = tuple(f"HOROVOD_{word}" for word in _LAUNCHERS.split())
_HOROVOD, _REPETITIONS = "0.28.1", 25
_BUILD = "scripts/setup in a clone of horovod_sparse builds it"
_STYLES = {"problem": ("x", "bold red"), "advice": ("!", "yellow"), "good": ("+", "green")}


def _above_0(text: str) -> bool:
    try:
        return 0.0 < float(text) < float("inf")
    except ValueError:
        return False


def _is_off(text: str) -> bool:
    return text.lower() in ("0", "false")


#: by setting: the level of another value, what is allowed, and that in words
_ALLOWED: dict[str, tuple[str, Callable[[str], bool], str]] = {
    EVERY_VARIABLE: ("problem", lambda text: whole_number(text) >= 0, "a number of steps, or 0 for never"),
    POLICY_VARIABLE: ("problem", POLICIES.__contains__, ", ".join(POLICIES)),
    RANKS_VARIABLE: ("problem", lambda text: whole_number(text) > 0, "a number of ranks, from 1"),
    TRANSPORT_VARIABLE: ("problem", WAYS.__contains__, ", ".join(WAYS)),
    "HOROVOD_CYCLE_TIME": ("problem", _above_0, "milliseconds above 0: else a thread polls on every rank"),
    "HOROVOD_AUTOTUNE": ("advice", _is_off, "0: it tunes for the bytes of allreduces, of which few are left"),
    "HOROVOD_STALL_CHECK_DISABLE": ("advice", _is_off, "0: else ranks wait for ever for one that is gone"),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("advice", _above_0, "300, say: else ranks wait for ever"),
}


class Finding(NamedTuple):
    """A finding of level "problem", "advice" or "good", and the reason with the remedy."""

    level: str
    topic: str
    what: str
    do: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit code 1 if there is a problem. Run it as the training is run: mpirun -np 4 ..."
    text = "to look at (default: torch if it is there)"
    parser.add_argument("--framework", choices=FRAMEWORKS, help=text)


def run(options: argparse.Namespace) -> int:
    """Examines all ranks; rank 0 prints."""
    rank, missing, facts = 0, "", local_facts()
    everyone = [facts]
    try:
        if facts["launcher"]:
            launch = start(options.framework)
            try:
                rank, everyone = launch.rank, launch.gathered({**facts, **rank_facts(launch)})
            finally:
                launch.end()
        else:
            importlib.import_module(f"horovod_sparse.{usable_framework(options.framework)}")
    except HorovodMissingError as error:
        missing = str(error).partition(". ")[0]
    findings = list(examine(everyone, options.framework))
    if missing and not any(one.topic == "Horovod" for one in findings if one.level != "good"):
        findings.append(Finding("problem", "Horovod", missing, _BUILD))
    findings.sort(key=lambda one: list(_STYLES).index(one.level))
    levels = [one.level for one in findings]
    if rank == 0:
        to = console()
        show(to, "horovod-sparse doctor", "bold")
        for level, topic, what, do in findings:
            sign, style = _STYLES[level]
            show(to, f"{sign} {topic}: {what}", style)
            if do:
                show(to, f"    {do}")
        show(to, ", ".join(f"{level}: {levels.count(level)}" for level in _STYLES), "bold")
    return int("problem" in levels)


def local_facts() -> dict[str, Any]:
    """Returns what a process knows alone, in plain values, with defaults for what ranks add."""
    packages = {}
    for name in _PACKAGES.split():
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "packages": packages,
        "bindings": bindings(),
        "launcher": launcher(),
        "settings": {name: text.strip() for name, text in os.environ.items() if name.startswith("HOROVOD_")},
        "cores": sorted(os.sched_getaffinity(0)),
        "host": platform.node(),
        "kernels": _why_no_kernels(),
        "threads": os.cpu_count() or 1,
        "size": 1,
        "controller": "",
        "thread_level": "",
        "latency_seconds": 0.0,
    }


def _why_no_kernels() -> str:
    """Returns why the kernels of the host cannot run; empty if they can."""
    try:
        accumulator = importlib.import_module("horovod_sparse.arrays").HostAccumulator(3, density=1.0)
        accumulator.fold(np.array([1.0, -3.0, 2.0], np.float32))
        found = accumulator.largest(1).tolist()
    except Exception as error:  # any error is the finding
        return f"{type(error).__name__}: {error}"
    return "" if found == [1] else f"the largest of [1, -3, 2] was found at {found}"


def rank_facts(launch: Launch) -> dict[str, Any]:
    """Returns what a rank of a launch adds; all ranks call it together."""
    framework = importlib.import_module(launch.framework)
    if launch.framework == "torch":
        threads = framework.get_num_threads()
    else:
        threads = framework.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1
    facts = {"size": launch.size, "controller": launch.controller, "threads": int(threads)}
    if launch.controller == "mpi":
        try:
            level = importlib.import_module("mpi4py.MPI").Query_thread()
            facts["thread_level"] = ("single", "funneled", "serialized", "multiple")[level]
        except ImportError:
            facts["thread_level"] = "unknown, without mpi4py"
    if launch.size > 1:
        facts["latency_seconds"] = launch.carry_out(_latency(launch))
    return facts


def _latency(launch: Launch) -> Synchronization[float]:
    """Returns the median seconds of an allgather of one word, the same on all ranks."""
    watch = Stopwatch(launch.rank, launch.size, time.perf_counter, time.sleep, cycle_seconds=1e-3)
    own = []
    for _ in range(_REPETITIONS):
        yield from watch.meet()
        started = time.perf_counter()
        yield AllGather(np.zeros(1, np.int32))
        own.append(time.perf_counter() - started)
    shared = yield from watch.shared(own)
    return float(median(shared.tolist()))


def examine(everyone: Sequence[Facts], asked: str | None = None) -> Iterator[Finding]:
    """Yields findings from the facts of all ranks, in rank order; `asked` is the framework."""
    first = everyone[0]
    packages = ", ".join(f"{name} {number}" for name, number in first["packages"].items())
    yield Finding("good", "versions", f"Python {first['python']}, {packages}")
    if first["kernels"]:
        do = "Selection needs them: install a numba>=0.60 that knows this NumPy, with a writable cache folder"
        yield Finding("problem", "kernels", first["kernels"], do)
    if first["launcher"] != "torchrun":
        yield from _horovod(first, asked)
    yield from _launch(first)
    yield from _settings(first)
    yield from _hosts(everyone)
    yield from _differences(everyone)


def _horovod(facts: Facts, asked: str | None) -> Iterator[Finding]:
    packages, topic = facts["packages"], "Horovod"
    built = [name for name in FRAMEWORKS if facts["bindings"][name]]
    installed = [name for name in FRAMEWORKS if name in packages or f"{name}-cpu" in packages]
    usable = [name for name in built if name in installed]
    what = f"{packages.get(topic.lower())}, built for {' and '.join(built) or 'nothing'}"
    remedy = f"Installed: {' and '.join(installed) or 'no framework'}. {_BUILD}"
    if "horovod" not in packages:
        alone = "torch" in packages and asked is None and not facts["launcher"]
        do = "horovod_sparse.ddp with torchrun works without it. " if alone else ""
        yield Finding("advice" if alone else "problem", topic, "not installed", do + _BUILD)
    elif not usable or asked not in (None, *usable):
        yield Finding("problem", topic, what, remedy)
    elif built != installed:
        yield Finding("advice", topic, what, remedy)
    elif not packages["horovod"].startswith(_HOROVOD):
        yield Finding("advice", topic, what, f"horovod_sparse is tested with {_HOROVOD}: run scripts/test")
    else:
        yield Finding("good", topic, what)


def _launch(facts: Facts) -> Iterator[Finding]:
    by, level, do = facts["launcher"], "good", ""
    what = f"{facts['size']} ranks, started by {by}, controller {facts['controller']}"
    what += f"; an allgather of one word takes {1e3 * facts['latency_seconds']:.2f} ms"
    cycle = facts["settings"].get("HOROVOD_CYCLE_TIME") or "1"
    if facts["size"] == 1:
        level, what = "advice", "one rank" if by else "not launched"
        do = "Latency, threads and differences show under horovodrun, mpirun or torchrun, with several ranks"
    elif facts["controller"] == "mpi" and facts["thread_level"] != "multiple":
        level, what = "advice", f"{what}; thread level {facts['thread_level']}"
        do = "Pairs of ranks then wait for Horovod's cycles: mpi4py>=4.0, and an MPI with THREAD_MULTIPLE"
    elif by == "horovod" and _above_0(cycle) and float(cycle) >= 0.5:
        level, what = "advice", f"{what}, cycle time {cycle} ms"
        do = "Each round waits for the next cycle: try HOROVOD_CYCLE_TIME=0.2 if steps are short, and measure"
    yield Finding(level, "launch", what, do)


def _settings(facts: Facts) -> Iterator[Finding]:
    for name, text in facts["settings"].items():
        level, fits, words = _ALLOWED.get(name, ("", bool, ""))
        if text and not fits(text):
            yield Finding(level, "settings", f"{name}={text}", f"Allowed: {words}")
        if name not in SETTINGS and not name.startswith(_OF_LAUNCHERS):
            for near in difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.88):
                yield Finding("advice", "settings", f"{name} is set", f"Nobody reads it: {near} is known")
    if facts["settings"].get(TRANSPORT_VARIABLE) == "pairs" and facts["controller"] == "gloo":
        yield Finding(
            "problem", "settings", f"{TRANSPORT_VARIABLE}=pairs", "Unset it: Gloo has no such messages"
        )


def _hosts(everyone: Sequence[Facts]) -> Iterator[Finding]:
    hosts = defaultdict[str, list[Facts]](list)
    for facts in everyone:
        hosts[facts["host"]].append(facts)
    counts = {len(ranks) for ranks in hosts.values()}
    if len(hosts) > 1 and len(counts) == 1 and min(counts) > 1:
        do = "levels='host' sums their gradients first, where the network within a host is faster"
        yield Finding("advice", "levels", f"{len(hosts)} hosts of {min(counts)} ranks", do)
    for ranks in hosts.values():
        cores = len({core for facts in ranks for core in facts["cores"]})
        threads = sum(facts["threads"] for facts in ranks)
        what = f"{len(ranks)} ranks of a host with {threads} threads on {cores} cores"
        if len(ranks) > cores:
            do = (
                "Ranks that wait take the cores of others: start fewer; Open MPI: --mca mpi_yield_when_idle 1"
            )
            yield Finding("advice", "threads", what, do)
        elif 1 < len(ranks) <= cores < threads:
            do = f"{cores // len(ranks)} each would fit: OMP_NUM_THREADS, TF_NUM_INTRAOP_THREADS"
            yield Finding("advice", "threads", what, do)


def _differences(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Yields `HOROVOD_CYCLE_TIME: 0.1 on rank 0; unset on rank 1, 2`."""
    names = ("python", "controller", "kernels", "thread_level", "threads")
    values = {name: [str(facts[name]) for facts in everyone] for name in names}
    values["cores"] = [str(len(facts["cores"])) for facts in everyone]
    for kind, unset in (("packages", "missing"), ("settings", "unset")):
        for name in sorted({name for facts in everyone for name in facts[kind]}):
            if not name.startswith(_OF_LAUNCHERS):
                default = "auto" if name == TRANSPORT_VARIABLE else unset
                values[name] = [facts[kind].get(name) or default for facts in everyone]
    for name, found in values.items():
        ranks = defaultdict[str, list[str]](list)
        for rank, value in enumerate(found):
            ranks[value].append(str(rank))
        if len(ranks) > 1:
            what = "; ".join(f"{value} on rank {', '.join(some[:6])}" for value, some in ranks.items())
            if name in _STRICT or name in _PACKAGES.split():
                level, do = (
                    "problem",
                    "Ranks then wait for each other or disagree: make it the same on all hosts",
                )
            else:
                level, do = "advice", "The slowest rank sets the pace: make it the same, if that is not meant"
            yield Finding(level, "ranks differ", f"{name}: {what}", do)
