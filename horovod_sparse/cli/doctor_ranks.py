"""What the doctor makes of the ranks of a launch: threads of a host, and differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from horovod_sparse.cli.doctor_findings import Finding, advice, good, problem

__all__ = ["check_differences", "check_threads", "is_own"]

Facts = Mapping[str, Any]

#: settings that have to be the same on all ranks, or they wait for each other
_STRICT = ("HOROVOD_CACHE_CAPACITY", "HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_CPU_OPERATIONS")
#: set by launchers for each rank
_OWN = (
    "RANK",
    "SIZE",
    "HOSTNAME",
    "GLOO",
    "CONTROLLER",
    "SECRET",
    "RENDEZVOUS",
    "LOCAL",
    "CROSS",
    "JOB",
    "NUM_PROC",
)


def check_threads(facts: Facts) -> Iterator[Finding]:
    """Threads of all ranks of a host against its cores.

    Args:
        facts: of a rank of a launch.
    """
    local, cores, threads = facts["local_size"], facts["cores"], facts["framework_threads"]
    what = f"{local} ranks on this host, {threads} threads each, {cores} cores for this rank"
    if local > cores:
        yield advice(
            "threads",
            what,
            "ranks that wait take the cores that others need: a launch can take many times as long",
            "fewer ranks on a host; with Open MPI --mca mpi_yield_when_idle 1",
        )
    if threads > 1 and threads * local > max(cores, 1) and facts["size"] > 1:
        each = max(1, cores // local)
        yield advice(
            "threads",
            what,
            "their threads push each other, and Horovod's own thread, off the cores",
            f"OMP_NUM_THREADS={each}"
            + (" and TF_NUM_INTRAOP_THREADS" if facts["framework"] != "torch" else ""),
        )
    elif local <= cores:
        yield good("threads", what)


def check_differences(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """What is not the same on all ranks.

    Args:
        everyone: facts of all ranks, in rank order.
    """
    strict: dict[str, list[str]] = {"Python": [str(facts["python"]) for facts in everyone]}
    loose: dict[str, list[str]] = {}
    for name in sorted({name for facts in everyone for name in facts["packages"]}):
        strict[name] = [facts["packages"].get(name, "missing") for facts in everyone]
    for name in sorted({name for facts in everyone for name in facts["settings"]}):
        if not is_own(name):
            kind = strict if name in _STRICT else loose
            kind[name] = [facts["settings"].get(name, "unset") for facts in everyone]
    for what in ("built", "controller", "framework", "numba"):
        strict[what] = [str(facts[what]) for facts in everyone]
    for what in ("cores", "framework_threads", "thread_level", "cuda", "triton"):
        loose[what.replace("_", " ")] = [str(facts[what]) for facts in everyone]
    found = 0
    for name, values in (*strict.items(), *loose.items()):
        if len(set(values)) == 1:
            continue
        found += 1
        if name in strict:
            why = "ranks that run different code, or cache differently, wait for each other or disagree"
            yield problem("ranks differ", f"{name}: {_by_rank(values)}", why, "make it the same on all hosts")
        else:
            why = "the slowest rank sets the pace, and Horovod takes some settings from rank 0 only"
            yield advice(
                "ranks differ", f"{name}: {_by_rank(values)}", why, "make it the same, if that is not meant"
            )
    if not found and len(everyone) > 1:
        yield good("ranks", "all have the same versions, builds, settings and threads")


def _by_rank(values: Sequence[str]) -> str:
    """`0.1 on rank 0, unset on ranks 1-3`."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    parts = []
    for value, ranks in groups.items():
        shown = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
        parts.append(f"{value} on rank{'' if len(ranks) == 1 else 's'} {shown}")
    return "; ".join(parts)


def is_own(name: str) -> bool:
    """Whether launchers set this variable, for every rank its own."""
    rest = name.removeprefix("HOROVOD_")
    return any(rest.startswith(word) for word in _OWN)
