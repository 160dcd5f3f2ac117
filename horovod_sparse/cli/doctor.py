"""`horovod-sparse doctor`: finds what makes a launch fail, hang or lag without a message.

Errors and log lines of a training itself are not repeated here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from horovod_sparse.cli.launch import FRAMEWORKS, bindings, connect_ranks, launcher, usable_framework
from horovod_sparse.collectives import gather_values
from horovod_sparse.errors import HorovodMissingError
from horovod_sparse.training.settings import TRANSPORT_VARIABLE

Facts: TypeAlias = Mapping[str, Any]

_PACKAGES = "horovod horovod-sparse keras mpi4py numba numpy tensorflow tensorflow-cpu tf-keras torch triton"
#: variables that this package reads, without "HOROVOD_SPARSE_"
_OURS = ("CHECK_EVERY", "DEADLINE_SECONDS", "RANKS_PER_HOST", "TENSOR_SELECTION", "TRANSPORT")
#: with these begin variables that a launcher sets differently on every rank
_LAUNCHERS = "RANK SIZE HOSTNAME GLOO CONTROLLER SECRET RENDEZVOUS LOCAL CROSS JOB NUM_PROC"
_OF_LAUNCHERS = tuple(f"HOROVOD_{word}" for word in _LAUNCHERS.split())
#: facts that have to be equal on all ranks, beside packages
_OF_HOROVOD = ("HOROVOD_CACHE_CAPACITY", "HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_CPU_OPERATIONS")
_STRICT = ("python", "controller", "kernels", TRANSPORT_VARIABLE, *_OF_HOROVOD)
_HOROVOD, _BUILD = "0.28.1", "scripts/setup in a clone of horovod_sparse builds it"
#: in the order in which findings are printed
_LEVELS = ("problem", "advice", "good")


class Finding(NamedTuple):
    """A result of `doctor`: its level ("problem", "advice" or "good"), and what the user can do."""

    level: str
    topic: str
    what: str
    do: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit code 1 if there is a problem. Run it as the training is run: mpirun -np 4 ..."
    text = "to look at (default: torch if it is there)"
    parser.add_argument("--framework", choices=FRAMEWORKS, help=text)


def run(options: argparse.Namespace) -> int:
    """Gathers facts of all ranks; rank 0 prints findings. Returns the exit code."""
    rank, missing, facts = 0, "", local_facts()
    everyone = [facts]
    try:
        if facts["launcher"]:
            launch = connect_ranks(options.framework)
            try:
                facts |= {"size": launch.placement.size, "controller": launch.controller}
                if launch.framework == "torch":
                    facts["threads"] = int(importlib.import_module("torch").get_num_threads())
                rank, everyone = launch.placement.rank, launch.carry_out(gather_values(facts))
            finally:
                launch.end()
        else:
            importlib.import_module(f"horovod_sparse.{usable_framework(options.framework)}")
    except HorovodMissingError as error:
        missing = str(error).partition(". ")[0]
    findings = list(examine(everyone, options.framework))
    if missing and not any(one.topic == "Horovod" for one in findings if one.level != "good"):
        findings.append(Finding("problem", "Horovod", missing, _BUILD))
    findings.sort(key=lambda one: _LEVELS.index(one.level))
    for level, topic, what, do in findings if rank == 0 else ():
        print(f"{level}: {topic}: {what}" + (f"\n    {do}" if do else ""))
    return int(any(one.level == "problem" for one in findings))


def local_facts() -> dict[str, Any]:
    """Returns facts about this process by name, as plain values; `run` adds those about the launch."""
    # an installation that was broken off leaves a folder without a name
    found = [one for one in importlib.metadata.distributions() if one.name]
    versions = {one.name.lower().replace("_", "-"): one.version for one in found}
    return {
        "python": platform.python_version(),
        "packages": {name: versions[name] for name in _PACKAGES.split() if name in versions},
        "bindings": bindings(),
        "launcher": launcher(),
        "settings": {name: text.strip() for name, text in os.environ.items() if name.startswith("HOROVOD_")},
        "cores": sorted(os.sched_getaffinity(0)),
        "host": platform.node(),
        "kernels": _why_no_kernels(),
        "threads": os.cpu_count() or 1,
        "size": 1,
        "controller": "",
    }


def _why_no_kernels() -> str:
    """Returns why the compiled kernels cannot run on this host; empty if they can."""
    try:
        accumulator = importlib.import_module("horovod_sparse.arrays").HostAccumulator(3, density=1.0)
        accumulator.fold(np.array([1.0, -3.0, 2.0], np.float32))
        found = accumulator.largest(1).tolist()
    except Exception as error:  # any error is the finding
        return f"{type(error).__name__}: {error}"
    return "" if found == [1] else f"the largest of [1, -3, 2] was found at {found}"


def examine(everyone: Sequence[Facts], asked: str | None = None) -> Iterator[Finding]:
    """Yields findings from the facts of all ranks, in rank order; `asked` is the framework or None."""
    first = everyone[0]
    packages = ", ".join(f"{name} {number}" for name, number in first["packages"].items())
    yield Finding("good", "versions", f"Python {first['python']}, {packages}")
    if first["kernels"]:
        do = "Selection needs them: install a numba>=0.60 that knows this NumPy, with a writable cache folder"
        yield Finding("problem", "kernels", first["kernels"], do)
    if first["size"] == 1:
        do = "Threads and differences between ranks show under horovodrun, mpirun or torchrun"
        yield Finding("advice", "launch", "one rank" if first["launcher"] else "not launched", do)
    else:
        words = f"{first['size']} ranks, started by {first['launcher']}, controller {first['controller']}"
        yield Finding("good", "launch", words)
    if first["launcher"] != "torchrun":
        yield from _examine_horovod(first, asked)
        if "horovod" in first["packages"]:
            yield from _examine_settings(first["settings"])
    for name in first["settings"]:
        if name.startswith("HOROVOD_SPARSE_") and name.removeprefix("HOROVOD_SPARSE_") not in _OURS:
            do = f"Nobody reads it; known are {', '.join(_OURS)}"
            yield Finding("advice", "settings", f"{name} is set", do)
    yield from _examine_threads(everyone)
    yield from _list_differences(everyone)


def _examine_horovod(facts: Facts, asked: str | None) -> Iterator[Finding]:
    packages, topic = facts["packages"], "Horovod"
    built = [name for name in FRAMEWORKS if facts["bindings"][name]]
    installed = [name for name in FRAMEWORKS if name in packages or f"{name}-cpu" in packages]
    what = f"{packages.get('horovod')}, built for {' and '.join(built) or 'nothing'}"
    do = f"Installed: {' and '.join(installed) or 'no framework'}. {_BUILD}"
    if "horovod" not in packages:
        alone = "torch" in packages and asked is None and not facts["launcher"]
        do = "horovod_sparse.ddp with torchrun works without it. " if alone else ""
        yield Finding("advice" if alone else "problem", topic, "not installed", do + _BUILD)
    elif not set(built).intersection(installed) or asked not in (None, *built):
        yield Finding("problem", topic, what, do)
    elif built != installed:
        yield Finding("advice", topic, what, do)
    elif not packages["horovod"].startswith(_HOROVOD):
        yield Finding("advice", topic, what, f"horovod_sparse is tested with {_HOROVOD}: run scripts/test")
    else:
        yield Finding("good", topic, what)


def _examine_settings(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings about Horovod's environment variables that cost time or do nothing."""

    def numeric_setting(name: str, default: float) -> float:
        try:
            return float(settings.get(f"HOROVOD_{name}") or default)
        except ValueError:
            return 0.0  # as Horovod reads it

    cycle = numeric_setting("CYCLE_TIME", 1.0)
    if cycle <= 0.0:
        do = "A thread then polls on every rank: HOROVOD_CYCLE_TIME=0.5, or unset it"
        yield Finding("problem", "settings", "HOROVOD_CYCLE_TIME is 0 or no number", do)
    elif cycle >= 0.5:
        do = "Each round waits for the next cycle: try HOROVOD_CYCLE_TIME=0.2 if steps are short, and measure"
        yield Finding("advice", "cycle time", f"{cycle:g} ms", do)
    if numeric_setting("AUTOTUNE", 0.0):
        do = "It tunes for the bytes of allreduces, of which few are left: unset it"
        yield Finding("advice", "settings", "HOROVOD_AUTOTUNE", do)
    if numeric_setting("STALL_CHECK_DISABLE", 0) or numeric_setting("STALL_SHUTDOWN_TIME_SECONDS", 1) <= 0:
        do = "Ranks wait for ever for one that is gone: unset HOROVOD_STALL_*"
        yield Finding("advice", "settings", "no stall check", do)


def _examine_threads(everyone: Sequence[Facts]) -> Iterator[Finding]:
    hosts = defaultdict[str, list[Facts]](list)
    for facts in everyone:
        hosts[facts["host"]].append(facts)
    for ranks in hosts.values():
        cores = len({core for facts in ranks for core in facts["cores"]})
        threads, do = sum(facts["threads"] for facts in ranks), ""
        if len(ranks) > cores:
            do = "Ranks that wait take others' cores: start fewer; Open MPI: --mca mpi_yield_when_idle 1"
        elif 1 < len(ranks) <= cores < threads:
            do = f"{cores // len(ranks)} each would fit: OMP_NUM_THREADS, TF_NUM_INTRAOP_THREADS"
        if do:
            what = f"{len(ranks)} ranks of a host with {threads} threads on {cores} cores"
            yield Finding("advice", "threads", what, do)


def _list_differences(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Yields findings about facts that differ between ranks, with the ranks that have each value."""
    names = ("python", "controller", "kernels", "threads")
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
            level, do = "advice", "The slowest rank sets the pace: make it the same, if that is not meant"
            if name in (*_STRICT, *_PACKAGES.split()):
                level, do = "problem", "Ranks then wait for each other or disagree: make it the same on all"
            yield Finding(level, "ranks differ", f"{name}: {what}", do)
