"""What the doctor makes of the ranks of a launch: threads of a host, and differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from horovod_sparse.cli.doctor.findings import Finding, advice, good, problem

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


def check_threads(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Threads of the ranks of a host against the cores that they may use.

    Args:
        everyone: facts of all ranks, in rank order.
    """
    hosts: dict[str, list[Facts]] = {}
    for facts in everyone:
        hosts.setdefault(facts["host"], []).append(facts)
    for ranks in hosts.values():
        if found := list(_threads_of(ranks)):
            yield from found
            return  # of one host: the others are like it, or differ, which is said elsewhere
    first = next(iter(hosts.values()))
    yield good("threads", _threads_text(first))


def _cores(ranks: Sequence[Facts]) -> int:
    """Cores that a host's ranks may use together: a launcher may have bound each to its own."""
    return len({core for facts in ranks for core in facts["affinity"]})


def _threads_text(ranks: Sequence[Facts]) -> str:
    counts = {"rank": len(ranks), "thread": ranks[0]["framework_threads"], "core": _cores(ranks)}
    rank, thread, core = (f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())
    return f"{rank} on a host with {thread} each, and {core} for all of them"


def _threads_of(ranks: Sequence[Facts]) -> Iterator[Finding]:
    cores, what = _cores(ranks), _threads_text(ranks)
    total = sum(facts["framework_threads"] for facts in ranks)
    if len(ranks) > cores:
        yield advice(
            "threads",
            what,
            "ranks that wait take the cores that others need: a launch can take many times as long",
            "fewer ranks on a host; with Open MPI --mca mpi_yield_when_idle 1",
        )
    elif total > cores and len(ranks) > 1:
        names = "OMP_NUM_THREADS" if ranks[0]["framework"] == "torch" else "TF_NUM_INTRAOP_THREADS"
        yield advice(
            "threads",
            what,
            "their threads push each other, and Horovod's own thread, off the cores",
            f"{names}={max(1, cores // len(ranks))}",
        )


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
    loose["cores"] = [str(len(facts["affinity"])) for facts in everyone]
    for what in ("framework_threads", "thread_level", "cuda", "triton"):
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
