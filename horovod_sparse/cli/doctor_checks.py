"""What the doctor looks at: a function for every topic says what was found, why it matters, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from horovod_sparse.carriers.mpi import TRANSPORT_VARIABLE, WAYS
from horovod_sparse.checks import whole_number
from horovod_sparse.feedback import Recipe
from horovod_sparse.training.host_topology import RANKS_VARIABLE
from horovod_sparse.training.settings import EVERY_VARIABLE, POLICIES, POLICY_VARIABLE

Facts: TypeAlias = Mapping[str, Any]

#: what the doctor knows of Horovod's variables, and of ours, less their common beginning
_KNOWN = """
AUTOTUNE CACHE_CAPACITY CPU_OPERATIONS CYCLE_TIME DYNAMIC_PROCESS_SETS FUSION_THRESHOLD HIERARCHICAL_ALLGATHER
HIERARCHICAL_ALLREDUCE LOG_LEVEL NUM_NCCL_STREAMS SPARSE_CHECK_EVERY SPARSE_DEADLINE_SECONDS SPARSE_ON_DRIFT
SPARSE_RANKS_PER_HOST SPARSE_TENSOR_SELECTION SPARSE_TRANSPORT STALL_CHECK_DISABLE
STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS THREAD_AFFINITY TIMELINE TIMELINE_MARK_CYCLES
"""
SETTINGS = tuple(f"HOROVOD_{name}" for name in _KNOWN.split())
#: settings that have to be the same on all ranks, or they wait for each other
_STRICT = ("HOROVOD_CACHE_CAPACITY", "HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_CPU_OPERATIONS")
#: beginnings of what launchers set, for every rank its own
_LAUNCHERS = "RANK SIZE HOSTNAME GLOO CONTROLLER SECRET RENDEZVOUS LOCAL CROSS JOB NUM_PROC"
_OF_LAUNCHERS = tuple(f"HOROVOD_{word}" for word in _LAUNCHERS.split())
_HOROVOD = "0.28.1"
#: Horovod's own default
_CYCLE_MS = 1.0
_BUILD = (
    "scripts/setup in a clone of horovod_sparse builds it (HOROVOD_WITH_PYTORCH=1, HOROVOD_WITH_TENSORFLOW=1)"
)


class Finding(NamedTuple):
    """What was found ("problem", "advice" or "good") of a topic, why it matters, and the remedy."""

    level: str
    topic: str
    what: str
    why: str = ""
    do: str = ""


#: level, what, why and what to do, of a topic that is known
Found: TypeAlias = Iterator[tuple[str, ...]]


@dataclass(frozen=True)
class Case:
    """Facts of all ranks (`doctor.local_facts`) in rank order, and what the command line says."""

    everyone: Sequence[Facts]
    asked: str | None = None
    recipe: Recipe | None = None
    levels: str = "flat"

    @property
    def facts(self) -> Facts:
        return self.everyone[0]

    def setting(self, name: str) -> str:
        """Of the first rank; empty where it is not set."""
        return str(self.facts["settings"].get(f"HOROVOD_{name}", "")).strip()

    @property
    def num_rounds(self) -> int:
        """Of a bucket of the recipe's."""
        return 1 if self.recipe is None else len(self.recipe.sparsifier.rounds(max(2, self.facts["size"])))

    @property
    def hosts(self) -> list[list[Facts]]:
        """Ranks by host, as they are, or as HOROVOD_SPARSE_RANKS_PER_HOST says."""
        several, hosts = whole_number(self.setting("SPARSE_RANKS_PER_HOST")), dict[object, list[Facts]]()
        for rank, facts in enumerate(self.everyone):
            hosts.setdefault(rank // several if several > 0 else facts["host"], []).append(facts)
        return list(hosts.values())

    @property
    def frameworks(self) -> tuple[list[str], list[str]]:
        """Those that Horovod was built for, and those that are installed."""
        names = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}
        built = [name for name in names if self.facts["bindings"][name]]
        return built, [name for name in names if any(one in self.facts["packages"] for one in names[name])]


def examine(case: Case) -> list[Finding]:
    """What is found of every topic; what is good about it only where nothing is wrong."""
    findings = []
    for topic, look in _TOPICS.items():
        found = [Finding(level, topic, *words) for level, *words in look(case)]
        wrong = [one for one in found if one.level != "good"]
        findings += wrong or [one for one in found if one.what]
    return findings


def _and(names: Sequence[str]) -> str:
    return " and ".join(names) or "no framework"


def _versions(case: Case) -> Found:
    packages = (f"{name} {number}" for name, number in case.facts["packages"].items())
    yield "good", f"Python {case.facts['python']}, {', '.join(packages)}"


def _horovod(case: Case) -> Found:
    packages, (built, installed) = case.facts["packages"], case.frameworks
    if "horovod" not in packages:
        if "torch" not in packages or case.asked is not None or case.facts["launched"]:
            yield "problem", "not installed", "nothing can be synchronized", _BUILD
        else:
            why = "horovod_sparse.ddp works without it; horovod_sparse.torch and .tensorflow are not there"
            yield "advice", "not installed", why, f"nothing, if torchrun starts the training; else {_BUILD}"
        return
    usable = [name for name in built if name in installed]
    if not usable or case.asked not in (None, *usable):
        what = f"built for {_and(built)}; installed: {_and(installed)}"
        what += f"; asked for: {case.asked}" if case.asked else ""
        yield "problem", what, "its front end here cannot be imported", _BUILD
    else:
        odd = [f"built without {name}, which is installed" for name in installed if name not in built]
        odd += [f"built for {name}, which is not installed" for name in built if name not in installed]
        yield from (("advice", what, "that front end cannot be imported", _BUILD) for what in odd)
    if not packages["horovod"].startswith(_HOROVOD):
        do = f"install {_HOROVOD}, or run scripts/test with yours"
        yield "advice", f"version {packages['horovod']}", f"horovod_sparse is tested with {_HOROVOD}", do
    yield "good", f"built for {_and(built)}"


def _kernels(case: Case) -> Found:
    facts = case.facts
    if facts["kernels"]:
        do = "install numba>=0.60 in a version that knows this NumPy, and let its cache folder be writable"
        what = f"those of the host do not run: {facts['kernels']}"
        yield "problem", what, "selection and scattering need them", do
    if facts["cuda"] and facts["built"] and not facts["triton"]:
        why = "selection runs in plain PyTorch, which passes over memory several times"
        do = "install triton, in the version that belongs to this PyTorch"
        yield "advice", f"there is a GPU ({facts['cuda']}), and Triton is missing", why, do
    yield "good", "host: numba" + ("; Triton is there for GPUs" if facts["triton"] else "")


def _operations(case: Case) -> Found:
    cuda, built = case.facts["cuda"], case.facts["built"]
    if cuda and built and not built.get("nccl", False):
        why = "what stays dense is copied to the host to be summed, and back"
        do = "build it with HOROVOD_GPU_OPERATIONS=NCCL (scripts/setup --gpu)"
        yield "advice", f"there is a GPU ({cuda}), and Horovod is built without NCCL", why, do
    names = [name.upper() for name, there in built.items() if there]
    yield "good", ", ".join([*names, cuda or "no GPU in use: selection is on the host"])


def _launch(case: Case) -> Found:
    facts = case.facts
    if facts["size"] == 1 and facts["built"]:
        what = "one rank" if facts["launched"] else "not launched"
        why = "controller, latency, threads and differences between ranks show under a launch of several"
        do = "run it as the training is run: horovodrun --gloo -np 2 horovod-sparse doctor"
        yield "advice", what, why, do
    elif facts["controller"]:
        where = f"{facts['size']} ranks, {facts['local_size']} on this host, {facts['framework']}"
        yield "good", f"{where}, controller {facts['controller']}"


def _pairs(case: Case) -> Found:
    facts, transport = case.facts, case.setting("SPARSE_TRANSPORT")
    if facts["controller"] == "gloo":
        if transport == "pairs":
            why = "messages between pairs of ranks go over MPI alone: an optimizer refuses the setting"
            do = "unset it, or launch with MPI (horovodrun --mpi)"
            yield "problem", f"{TRANSPORT_VARIABLE}=pairs, and Horovod runs on Gloo", why, do
        yield "good", "Horovod's collectives carry all rounds"
    elif facts["controller"] == "mpi":
        what = ""
        if transport == "alltoall":
            what = f"{TRANSPORT_VARIABLE}=alltoall"
        elif facts["thread_level"] is None:
            what = "mpi4py is not installed"
        elif not facts["mpi_threads"] or facts["thread_level"] != "multiple":
            what = f"MPI was started with thread level {facts['thread_level']}, not multiple"
        if what:
            why = (
                "gTop-k, SparDL and others exchange messages between pairs: each round then takes a cycle of "
            )
            do = (
                f"leave {TRANSPORT_VARIABLE} at auto, pip install 'mpi4py>=4.0', and let hvd.init() start an "
            )
            do += "MPI that was built for THREAD_MULTIPLE (import mpi4py.MPI after it)"
            yield "advice", what, why + "Horovod", do
        yield "good", "MPI's own messages, thread level multiple"


def _switched_on(case: Case, name: str) -> str:
    value = case.setting(name)
    return "" if value.lower() in ("", "0", "false") else f"HOROVOD_{name}={value}"


def _autotune(case: Case) -> Found:
    if what := _switched_on(case, "AUTOTUNE"):
        why = (
            "it counts the bytes of allreduces only, and tunes for next to nothing with sparsified gradients"
        )
        do = "unset HOROVOD_AUTOTUNE, and set HOROVOD_CYCLE_TIME yourself"
        yield "advice", what, why, do
    yield "good", "off"


def _stalls(case: Case) -> Found:
    try:
        after = float(case.setting("STALL_SHUTDOWN_TIME_SECONDS") or case.facts["gives_up"])
    except ValueError:
        after = 0.0
    if what := _switched_on(case, "STALL_CHECK_DISABLE") or ("" if after > 0.0 else "never ends a run"):
        do = "unset HOROVOD_STALL_CHECK_DISABLE, and set HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, to 300"
        yield "advice", what, "a collective that one rank does not join holds the others for ever", do
    yield "good", f"ends a run after {after:g} s"


def _settings(case: Case) -> Found:
    allowed: dict[str, tuple[Callable[[str], bool], str]] = {
        EVERY_VARIABLE: (lambda text: whole_number(text) >= 0, "a number of steps, or 0 for never"),
        POLICY_VARIABLE: (POLICIES.__contains__, ", ".join(POLICIES)),
        RANKS_VARIABLE: (lambda text: whole_number(text) > 0, "a number of ranks, from 1"),
        TRANSPORT_VARIABLE: (WAYS.__contains__, ", ".join(WAYS)),
    }
    for name, text in case.facts["settings"].items():
        fits, words = allowed.get(name, (None, ""))
        if fits is not None and text.strip() and not fits(text.strip()):
            what = f"{name}={text}, where {words} is allowed"
            yield "problem", what, "the training will begin with an error", "what is allowed, or unset it"
        if name not in SETTINGS and not name.startswith(_OF_LAUNCHERS):
            for near in difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.88):
                yield "advice", f"{name} is set; {near} is known", "Horovod does not know it", "rename it"


def _levels(case: Case) -> Found:
    sizes = sorted({len(ranks) for ranks in case.hosts})
    if len(case.hosts) < 2 or sizes == [1]:
        return
    what = f"{len(case.hosts)} hosts of {' or '.join(map(str, sizes))} ranks, levels={case.levels!r}"
    if len(sizes) > 1:
        if case.levels == "host":
            why = "two levels need as many ranks on every host: the first step will raise an error"
            yield "problem", what, why, "start as many ranks on each, or levels='flat'"
    elif case.levels == "flat":
        why = "the ranks of a host share its network card, and each sends and selects for itself"
        do = "levels='host', which sums gradients within hosts first, where the network there is faster"
        yield "advice", what, why, do
    else:
        yield "good", what


def _threads(case: Case) -> Found:
    """Launchers may bind ranks to cores of their own."""
    hosts: dict[str, list[Facts]] = {}
    for facts in case.everyone:
        hosts.setdefault(facts["host"], []).append(facts)
    for ranks in hosts.values():
        cores = len({core for facts in ranks for core in facts["affinity"]})
        threads = sum(facts["framework_threads"] for facts in ranks)
        counts = {"rank": len(ranks), "thread": ranks[0]["framework_threads"], "core": cores}
        rank, thread, core = (f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())
        what = f"{rank} on a host with {thread} each, and {core} for all of them"
        if len(ranks) > cores:
            why = "ranks that wait take the cores that others need: a launch can take many times as long"
            yield "advice", what, why, "fewer ranks on a host; with Open MPI --mca mpi_yield_when_idle 1"
        elif 1 < len(ranks) <= cores < threads:
            why = "their threads push each other, and Horovod's own thread, off the cores"
            do = "OMP_NUM_THREADS with PyTorch, TF_NUM_INTRAOP_THREADS with TensorFlow"
            yield "advice", f"{what}: {cores // len(ranks)} each would fit", why, do
        yield "good", what


def _differences(case: Case) -> Found:
    everyone = case.everyone
    if len(everyone) == 1:
        return
    of_rank = ("python", "controller", "framework", "built", "kernels")
    strict = {name: [str(facts[name]) for facts in everyone] for name in of_rank}
    for name in sorted({name for facts in everyone for name in facts["packages"]}):
        strict[name] = [facts["packages"].get(name, "missing") for facts in everyone]
    loose = {"cores": [str(len(facts["affinity"])) for facts in everyone]}
    for name in ("framework_threads", "thread_level", "cuda", "triton"):
        loose[name.replace("_", " ")] = [str(facts[name]) for facts in everyone]
    for name in sorted({name for facts in everyone for name in facts["settings"]} - {TRANSPORT_VARIABLE}):
        if not name.startswith(_OF_LAUNCHERS):
            found = [facts["settings"].get(name, "unset") for facts in everyone]
            (strict if name in _STRICT else loose)[name] = found
    asked = [facts["settings"].get(TRANSPORT_VARIABLE, "").strip() for facts in everyone]
    strict[TRANSPORT_VARIABLE] = [text or "auto" for text in asked]
    why = "ranks that run different code, or cache differently, wait for each other or disagree"
    do = "make it the same on all hosts"
    yield from (("problem", what, why, do) for what in _differing(strict))
    why = "the slowest rank sets the pace, and Horovod takes some settings from rank 0 only"
    do = "make it the same, if that is not meant"
    yield from (("advice", what, why, do) for what in _differing(loose))
    yield "good", "in nothing: versions, builds, settings and threads are the same on all"


def _differing(values: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """`HOROVOD_CYCLE_TIME: 0.1 on rank 0; unset on ranks 1, 2`."""
    for name, found in values.items():
        parts = []
        for value in dict.fromkeys(found):
            ranks = [str(rank) for rank, other in enumerate(found) if other == value]
            shown = ", ".join(ranks[:6]) + (", ..." if len(ranks) > 6 else "")
            parts.append(f"{value} on rank{'' if len(ranks) == 1 else 's'} {shown}")
        if len(parts) > 1:
            yield f"{name}: {'; '.join(parts)}"


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


def _cycle(case: Case) -> Found:
    cycle, told = cycle_of(case.facts["settings"]), case.setting("CYCLE_TIME")
    if not cycle:
        why = "Horovod takes 0 for what is no number; its thread then polls and takes a core from every rank"
        do = "milliseconds, 0.1 or more, as in HOROVOD_CYCLE_TIME=0.5"
        yield "problem", f"HOROVOD_CYCLE_TIME={told}", why, do
        return
    what, latency = f"{cycle:g} ms" + ("" if told else " (Horovod's default)"), case.facts["latency_seconds"]
    if latency is not None:
        what += f"; an allgather of one word takes {latency * 1e3:.2f} ms"
    if cycle >= 0.5 and case.facts["built"]:
        most = case.num_rounds * (cycle - 0.1)
        worth = (
            f"with {case.num_rounds} rounds a bucket, 0.1 ms saves {most / 2:.2f} ms of a step in the mean"
        )
        do = "try HOROVOD_CYCLE_TIME=0.2 if steps are short, and measure it: short cycles cost processor time"
        why = "every round of a bucket waits for the next cycle"
        yield "advice", f"{what}; {worth}, {most:.2f} ms at most", why, do
    yield "good", what


_TOPICS: dict[str, Callable[[Case], Found]] = {
    "versions": _versions,
    "Horovod": _horovod,
    "kernels": _kernels,
    "operations": _operations,
    "launch": _launch,
    "pairs of ranks": _pairs,
    "autotune": _autotune,
    "stall check": _stalls,
    "settings": _settings,
    "levels": _levels,
    "threads": _threads,
    "ranks differ": _differences,
    "cycle time": _cycle,
}
