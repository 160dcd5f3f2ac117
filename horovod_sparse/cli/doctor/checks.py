"""The doctor's checks in tables: what is looked at, why it matters, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from horovod_sparse.carriers.shared_memory import MEMORY_VARIABLE
from horovod_sparse.carriers.transport_choice import TRANSPORT_VARIABLE, WAYS
from horovod_sparse.checks import whole_number
from horovod_sparse.cli.doctor.facts import cycle_of
from horovod_sparse.cli.plan.accuracy import accuracy, loses, remedy
from horovod_sparse.cli.plan.verdict import Verdict
from horovod_sparse.feedback import Recipe
from horovod_sparse.training.host_topology import RANKS_VARIABLE
from horovod_sparse.training.settings import EVERY_VARIABLE, POLICIES, POLICY_VARIABLE

Facts: TypeAlias = Mapping[str, Any]

#: what the doctor knows of Horovod's variables, and of ours, less their common beginning
_KNOWN = """
AUTOTUNE CACHE_CAPACITY CPU_OPERATIONS CYCLE_TIME DYNAMIC_PROCESS_SETS FUSION_THRESHOLD HIERARCHICAL_ALLGATHER
HIERARCHICAL_ALLREDUCE LOG_LEVEL NUM_NCCL_STREAMS SPARSE_CHECK_EVERY SPARSE_DEADLINE_SECONDS SPARSE_ON_DRIFT
SPARSE_RANKS_PER_HOST SPARSE_SHARED_MEMORY SPARSE_TENSOR_SELECTION SPARSE_TRANSPORT STALL_CHECK_DISABLE
STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS THREAD_AFFINITY TIMELINE TIMELINE_MARK_CYCLES
"""
SETTINGS = tuple(f"HOROVOD_{name}" for name in _KNOWN.split())
#: settings that have to be the same on all ranks, or they wait for each other
_STRICT = ("HOROVOD_CACHE_CAPACITY", "HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_CPU_OPERATIONS")
#: beginnings of what launchers set, for every rank its own
_LAUNCHERS = "RANK SIZE HOSTNAME GLOO CONTROLLER SECRET RENDEZVOUS LOCAL CROSS JOB NUM_PROC"
_OF_LAUNCHERS = tuple(f"HOROVOD_{word}" for word in _LAUNCHERS.split())
_HOROVOD = "0.28.1"
#: Horovod's own default (HOROVOD_CACHE_CAPACITY)
_CACHE = 1024
#: a shorter cycle is advised if it saves so much of an iteration
_WORTH = 0.03


@dataclass(frozen=True)
class Case:
    """Everything that the checks look at.

    Attributes:
        everyone: facts of all ranks (`doctor.facts`), in rank order.
        asked: the framework of the command line.
        recipe: of the training.
        optimizer: likewise, where it is told: some of `cli.plan.accuracy.OPTIMIZERS`.
        levels: of the training.
        num_rounds: of a bucket of its sparsifier.
        num_names: of collectives in a step; None where nothing says how many buckets there are.
        iterations: predicted seconds by cycle time in milliseconds, that of now first; empty where unknown.
        verdict: whether sparsifying the model pays here; None where nothing says so.
        num_elements: of the model.
        profile_refused: why the profile that was given cannot be applied.
        profile_differs: what it says otherwise than the launch.
    """

    everyone: Sequence[Facts]
    asked: str | None = None
    recipe: Recipe | None = None
    optimizer: str | None = None
    levels: str = "flat"
    num_rounds: int = 1
    num_names: int | None = None
    iterations: Mapping[float, float] | None = None
    verdict: Verdict | None = None
    num_elements: int = 0
    profile_refused: str = ""
    profile_differs: Sequence[str] = ()

    @property
    def facts(self) -> Facts:
        """Of the first rank."""
        return self.everyone[0]

    def setting(self, name: str) -> str:
        """Of the first rank; empty where it is not set."""
        return str(self.facts["settings"].get(f"HOROVOD_{name}", "")).strip()


class Finding(NamedTuple):
    """What was found ("problem", "advice" or "good"), why it matters, and the remedy."""

    level: str
    topic: str
    what: str
    why: str = ""
    do: str = ""


class Check(NamedTuple):
    """A row of the table.

    Attributes:
        topic: a word or two: "cycle time".
        look: gives what is found, in words; several where several are, nothing where it is well.
        why: it matters.
        do: the remedy.
    """

    topic: str
    look: Callable[[Case], str | Iterator[str]]
    why: str
    do: str


def examine(case: Case) -> list[Finding]:
    """All rows of the table, and of each topic without a finding what is good about it."""
    found = [
        Finding(level, check.topic, what, check.why, check.do)
        for level, checks in (("problem", PROBLEMS), ("advice", ADVICE))
        for check in checks
        for what in _each(check.look(case))
    ]
    topics = {finding.topic for finding in found}
    good = [
        Finding("good", topic, what)
        for topic, look in GOOD.items()
        if topic not in topics and (what := look(case))
    ]
    return found + good


def _each(told: str | Iterator[str]) -> list[str]:
    return list(filter(None, [told] if isinstance(told, str) else told))


def _missing(case: Case) -> str:
    """Whether Horovod is not installed; where PyTorch is, that is only advice."""
    return "" if "horovod" in case.facts["packages"] else "not installed"


def _needs_horovod(case: Case) -> bool:
    return "torch" not in case.facts["packages"] or case.asked is not None or case.facts["launched"]


def _frameworks(case: Case) -> tuple[list[str], list[str]]:
    """Those that Horovod was built for, and those that are installed."""
    names = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}
    built = [name for name in names if case.facts["bindings"][name]]
    return built, [name for name in names if any(one in case.facts["packages"] for one in names[name])]


def _unusable(case: Case) -> str:
    built, installed = _frameworks(case)
    usable = [name for name in built if name in installed]
    if _missing(case) or (usable and case.asked in (None, *usable)):
        return ""
    return f"built for {_and(built)}; installed: {_and(installed)}" + (
        f"; asked for: {case.asked}" if case.asked else ""
    )


def _and(names: Sequence[str]) -> str:
    return " and ".join(names) or "no framework"


def _half_usable(case: Case) -> Iterator[str]:
    built, installed = _frameworks(case)
    if not _missing(case) and not _unusable(case):
        yield from (f"built without {name}, which is installed" for name in installed if name not in built)
        yield from (f"built for {name}, which is not installed" for name in built if name not in installed)


def _other_version(case: Case) -> str:
    number = case.facts["packages"].get("horovod", _HOROVOD)
    return "" if number.startswith(_HOROVOD) else f"version {number}"


def _gpu_without(case: Case, what: str, there: bool) -> str:
    cuda = case.facts["cuda"]
    return f"there is a GPU ({cuda}), and {what}" if cuda and case.facts["built"] and not there else ""


def _pairs(case: Case) -> str:
    """What keeps messages between two ranks from going over MPI; empty where nothing does."""
    facts, transport = case.facts, case.setting("SPARSE_TRANSPORT")
    if facts["controller"] == "gloo":
        return f"{TRANSPORT_VARIABLE}=pairs, and Horovod runs on Gloo" if transport == "pairs" else ""
    if facts["controller"] is None:
        return ""
    if transport == "alltoall":
        return f"{TRANSPORT_VARIABLE}=alltoall"
    if facts["thread_level"] is None:
        return "mpi4py is not installed"
    if facts["mpi_threads"] and facts["thread_level"] == "multiple":
        return ""
    return f"MPI was started with thread level {facts['thread_level']}, not multiple"


def _on(case: Case, name: str) -> str:
    """The setting, if it is switched on."""
    value = case.setting(name)
    return "" if value.lower() in ("", "0", "false") else f"HOROVOD_{name}={value}"


def _gives_up(case: Case) -> float:
    """Seconds after which Horovod ends a run that hangs; 0 for never."""
    try:
        return float(case.setting("STALL_SHUTDOWN_TIME_SECONDS") or case.facts["gives_up"])
    except ValueError:
        return 0.0


def _refused(case: Case) -> Iterator[str]:
    """Settings of ours that an optimizer, or its first exchange, will refuse."""
    allowed: dict[str, tuple[Callable[[str], bool], str]] = {
        EVERY_VARIABLE: (lambda text: whole_number(text) >= 0, "a number of steps, or 0 for never"),
        POLICY_VARIABLE: (POLICIES.__contains__, ", ".join(POLICIES)),
        RANKS_VARIABLE: (lambda text: whole_number(text) > 0, "a number of ranks, from 1"),
        MEMORY_VARIABLE: (("0", "1").__contains__, "1, or 0 for messages within a host, too"),
        TRANSPORT_VARIABLE: (WAYS.__contains__, ", ".join(WAYS)),
    }
    for name, (fits, words) in allowed.items():
        text = str(case.facts["settings"].get(name, "")).strip()
        if text and not fits(text):
            yield f"{name}={text}, where {words} is allowed"


def _misspelt(case: Case) -> Iterator[str]:
    for name in case.facts["settings"]:
        if name not in SETTINGS and not name.startswith(_OF_LAUNCHERS):
            near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.88)
            yield from (f"{name} is set; {other} is known" for other in near)


def _hosts(case: Case) -> list[list[Facts]]:
    """Ranks by host, as they are, or as HOROVOD_SPARSE_RANKS_PER_HOST says."""
    several, hosts = whole_number(case.setting("SPARSE_RANKS_PER_HOST")), dict[object, list[Facts]]()
    for rank, facts in enumerate(case.everyone):
        hosts.setdefault(rank // several if several > 0 else facts["host"], []).append(facts)
    return list(hosts.values())


def _levels(case: Case) -> str:
    """Hosts of several ranks, in words; empty where there are none."""
    sizes = sorted({len(ranks) for ranks in _hosts(case)})
    if len(_hosts(case)) < 2 or sizes == [1]:
        return ""
    return f"{len(_hosts(case))} hosts of {' or '.join(map(str, sizes))} ranks, levels={case.levels!r}"


def _even(case: Case) -> bool:
    return len({len(ranks) for ranks in _hosts(case)}) == 1


def _no_shared_memory(case: Case) -> str:
    reasons = [facts["no_shared_memory"] for facts in case.everyone if facts["no_shared_memory"]]
    if case.levels == "flat" or not _levels(case) or not _even(case) or not reasons:
        return ""
    return f"gradients are summed within hosts by messages: {reasons[0]}"


def _ranks_by_cores(case: Case) -> list[tuple[str, int, int, int]]:
    """Of every host: in words, ranks, threads of all, and cores: a launcher may bind ranks to their own."""
    hosts: dict[str, list[Facts]] = {}
    for facts in case.everyone:
        hosts.setdefault(facts["host"], []).append(facts)
    rows = []
    for ranks in hosts.values():
        cores = len({core for facts in ranks for core in facts["affinity"]})
        counts = {"rank": len(ranks), "thread": ranks[0]["framework_threads"], "core": cores}
        rank, thread, core = (f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())
        words = f"{rank} on a host with {thread} each, and {core} for all of them"
        rows.append((words, len(ranks), sum(facts["framework_threads"] for facts in ranks), cores))
    return rows


def _crowded(case: Case) -> str:
    return next((words for words, ranks, _, cores in _ranks_by_cores(case) if ranks > cores), "")


def _pushing(case: Case) -> str:
    for words, ranks, threads, cores in _ranks_by_cores(case):
        if 1 < ranks <= cores < threads:
            return f"{words}: {cores // ranks} each would fit"
    return ""


def _differing(case: Case, *, strict: bool) -> Iterator[str]:
    """What is not the same on all ranks; strictly what makes them wait for each other or disagree."""
    everyone = case.everyone
    values = {
        name: [str(facts[name]) for facts in everyone] for name in ("python", "controller", "framework")
    }
    values |= {name: [str(facts[name]) for facts in everyone] for name in ("built", "kernels")}
    for name in sorted({name for facts in everyone for name in facts["packages"]}):
        values[name] = [facts["packages"].get(name, "missing") for facts in everyone]
    for name in sorted({name for facts in everyone for name in facts["settings"]}):
        if not name.startswith(_OF_LAUNCHERS) and (name in _STRICT) == strict and name != TRANSPORT_VARIABLE:
            values[name] = [facts["settings"].get(name, "unset") for facts in everyone]
    if strict:
        asked = [facts["settings"].get(TRANSPORT_VARIABLE, "").strip() for facts in everyone]
        values[TRANSPORT_VARIABLE] = [text or "auto" for text in asked]
    else:
        values = {name: found for name, found in values.items() if name.startswith("HOROVOD_")}
        values["cores"] = [str(len(facts["affinity"])) for facts in everyone]
        for name in ("framework_threads", "thread_level", "cuda", "triton"):
            values[name.replace("_", " ")] = [str(facts[name]) for facts in everyone]
    for name, found in values.items():
        if len(set(found)) > 1:
            yield f"{name}: {_by_rank(found)}"


def _by_rank(values: Sequence[str]) -> str:
    """`0.1 on rank 0; unset on ranks 1, 2`."""
    parts = []
    for value in dict.fromkeys(values):
        ranks = [str(rank) for rank, other in enumerate(values) if other == value]
        shown = ", ".join(ranks[:6]) + (", ..." if len(ranks) > 6 else "")
        parts.append(f"{value} on rank{'' if len(ranks) == 1 else 's'} {shown}")
    return "; ".join(parts)


def _cycle(case: Case) -> str:
    """The cycle time in words, with what was measured and predicted of it."""
    cycle, told = cycle_of(case.facts["settings"]), case.setting("CYCLE_TIME")
    text = f"{cycle:g} ms" + ("" if told else " (Horovod's default)")
    if case.facts["latency_seconds"] is not None:
        text += f"; an allgather of one word takes {case.facts['latency_seconds'] * 1e3:.2f} ms"
    if case.iterations:
        by_cycle = (f"{seconds * 1e3:.2f} ms at {at:g}" for at, seconds in case.iterations.items())
        text += f"; predicted iterations: {', '.join(by_cycle)}"
    return text


def _long_cycle(case: Case) -> str:
    cycle = cycle_of(case.facts["settings"])
    if not cycle or not case.facts["built"]:
        return ""
    if not case.iterations:
        most = case.num_rounds * (cycle - 0.1)
        told = f"{_cycle(case)}; with {case.num_rounds} rounds a bucket, 0.1 ms would save {most / 2:.2f} ms"
        return f"{told} of a step in the mean, {most:.2f} ms at most" if cycle >= 0.5 else ""
    best, now = min(case.iterations.values()), next(iter(case.iterations.values()))
    # the longest that is nearly as good: short cycles cost processor time
    chosen = max(at for at, seconds in case.iterations.items() if seconds <= best * 1.01)
    gain = 1.0 - case.iterations[chosen] / now
    return "" if gain < _WORTH else f"{_cycle(case)}; {chosen:g} saves {gain:.0%} by the model"


def _cache(case: Case) -> int:
    """HOROVOD_CACHE_CAPACITY; Horovod takes 0 for what is no number."""
    return max(0, whole_number(case.setting("CACHE_CAPACITY") or str(_CACHE)))


def _full_cache(case: Case) -> str:
    capacity, names = _cache(case), case.num_names or 0
    if names <= capacity or capacity == 0:
        return ""
    return f"{names} names in a step, room for {capacity} ({1 << (2 * names - 1).bit_length()} would do)"


def _cache_words(case: Case) -> str:
    if case.num_names is None:
        fits = _cache(case) // max(1, case.num_rounds)
        return f"{_cache(case)} names: {fits} buckets of {case.num_rounds} rounds (--model counts)"
    return f"{case.num_names} names in a step, room for {_cache(case)}"


def _gain(case: Case) -> str:
    verdict = case.verdict
    if verdict is None:
        return ""
    sparse, dense = (f"{seconds * 1e3:.2f} ms" for seconds in (verdict.sparse_seconds, verdict.dense_seconds))
    name = verdict.recipe.sparsifier.name
    return f"predicted iterations: {sparse} with {name}, {dense} dense ({case.num_elements:,} elements)"


def _loses(optimizer: str, case: Case) -> str:
    return loses(case.recipe, optimizer) if case.recipe is not None and case.optimizer == optimizer else ""


def _launch(case: Case) -> str:
    facts = case.facts
    where = f"{facts['size']} ranks, {facts['local_size']} on this host, {facts['framework']}"
    return f"{where}, controller {facts['controller']}" if facts["controller"] else ""


_BUILD = (
    "scripts/setup in a clone of horovod_sparse builds it (HOROVOD_WITH_PYTORCH=1, HOROVOD_WITH_TENSORFLOW=1)"
)
_ROUNDS = (
    "gTop-k, SparDL and others exchange messages between pairs: each round then takes a cycle of Horovod"
)
_CACHED = "what is not in the cache is negotiated anew: rank 0 gathers and broadcasts in every cycle"
_CALIBRATE = "horovod-sparse calibrate, as the training is launched"

#: what fails, or is slow for no reason
PROBLEMS = (
    Check(
        "Horovod",
        lambda case: _missing(case) if _needs_horovod(case) else "",
        "nothing can be synchronized",
        _BUILD,
    ),
    Check("Horovod", _unusable, "its front end here cannot be imported", _BUILD),
    Check(
        "kernels",
        lambda case: case.facts["kernels"] and f"those of the host do not run: {case.facts['kernels']}",
        "selection and scattering need them",
        "install numba>=0.60 in a version that knows this NumPy, and let its cache folder be writable",
    ),
    Check(
        "pairs of ranks",
        lambda case: _pairs(case) if case.facts["controller"] == "gloo" else "",
        "messages between pairs of ranks go over MPI alone: an optimizer refuses the setting",
        "unset it, or launch with MPI (horovodrun --mpi)",
    ),
    Check("settings", _refused, "the training will begin with an error", "what is allowed, or unset it"),
    Check(
        "levels",
        lambda case: _levels(case) if case.levels == "host" and not _even(case) else "",
        "two levels need as many ranks on every host: the first step will raise an error",
        "start as many ranks on each, or levels='flat'",
    ),
    Check(
        "ranks differ",
        lambda case: _differing(case, strict=True),
        "ranks that run different code, or cache differently, wait for each other or disagree",
        "make it the same on all hosts",
    ),
    Check(
        "cycle time",
        lambda case: (
            "" if cycle_of(case.facts["settings"]) else f"HOROVOD_CYCLE_TIME={case.setting('CYCLE_TIME')}"
        ),
        "Horovod takes 0 for what is no number; its thread then polls without a pause and takes a core from "
        "every rank (measured with 2 ranks on 2 cores: 12 to 40 ms for what takes 0.2 ms at 0.1)",
        "milliseconds, 0.1 or more, as in HOROVOD_CYCLE_TIME=0.5",
    ),
    Check(
        "profile",
        lambda case: case.profile_refused,
        "it cannot be applied here, and ranks that load it would refuse it",
        _CALIBRATE,
    ),
)

#: what could be better
ADVICE = (
    Check(
        "Horovod",
        lambda case: "" if _needs_horovod(case) else _missing(case),
        "horovod_sparse.ddp works without it; horovod_sparse.torch and .tensorflow cannot be imported",
        f"nothing, if torchrun starts the training; else {_BUILD}",
    ),
    Check("Horovod", _half_usable, "that front end cannot be imported", _BUILD),
    Check(
        "Horovod",
        _other_version,
        f"horovod_sparse is tested with {_HOROVOD}",
        f"install {_HOROVOD}, or run scripts/test with yours",
    ),
    Check(
        "kernels",
        lambda case: _gpu_without(case, "Triton is missing", case.facts["triton"]),
        "selection runs in plain PyTorch, which passes over memory several times",
        "install triton, in the version that belongs to this PyTorch",
    ),
    Check(
        "operations",
        lambda case: _gpu_without(
            case, "Horovod is built without NCCL", case.facts["built"].get("nccl", False)
        ),
        "what stays dense is copied to the host to be summed, and back",
        "build it with HOROVOD_GPU_OPERATIONS=NCCL (scripts/setup --gpu)",
    ),
    Check(
        "launch",
        lambda case: (
            ""
            if case.facts["size"] > 1 or not case.facts["built"]
            else ("one rank" if case.facts["launched"] else "not launched")
        ),
        "controller, latency, threads and differences between ranks show under a launch of several",
        "run it as the training is run: horovodrun --gloo -np 2 horovod-sparse doctor",
    ),
    Check(
        "pairs of ranks",
        lambda case: _pairs(case) if case.facts["controller"] == "mpi" else "",
        _ROUNDS,
        f"leave {TRANSPORT_VARIABLE} at auto, pip install 'mpi4py>=4.0', and let hvd.init() start an MPI "
        "that was built for THREAD_MULTIPLE (import mpi4py.MPI after it)",
    ),
    Check(
        "autotune",
        lambda case: _on(case, "AUTOTUNE"),
        "it counts the bytes of allreduces only, so with sparsified gradients it tunes for next to nothing, "
        "and changes cycle time and fusion while it tries",
        "unset HOROVOD_AUTOTUNE, and set HOROVOD_CYCLE_TIME yourself",
    ),
    Check(
        "stall check",
        lambda case: (
            _on(case, "STALL_CHECK_DISABLE") or ("" if _gives_up(case) > 0.0 else "never ends a run")
        ),
        "a collective that one rank does not join holds the others for ever",
        "unset HOROVOD_STALL_CHECK_DISABLE, and set HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, to 300 for instance",
    ),
    Check(
        "fusion",
        lambda case: "HOROVOD_FUSION_THRESHOLD=0" if case.setting("FUSION_THRESHOLD") == "0" else "",
        "messages that wait together go one by one, and each pays the network's latency",
        "unset it (128 MiB), or set it to some MiB",
    ),
    Check("settings", _misspelt, "Horovod does not know it", "rename it"),
    Check(
        "levels",
        lambda case: _levels(case) if case.levels == "flat" and _even(case) else "",
        "the ranks of a host share its network card, and each sends and selects for itself",
        "levels='host', which sums gradients within hosts first, where the network there is faster; "
        "horovod-sparse plan --per-host says what it is worth",
    ),
    Check(
        "shared memory",
        _no_shared_memory,
        "each gradient then goes through the loopback interface, several times slower",
        f"unset {MEMORY_VARIABLE}, and start the ranks of a host in one container",
    ),
    Check(
        "threads",
        _crowded,
        "ranks that wait take the cores that others need: a launch can take many times as long",
        "fewer ranks on a host; with Open MPI --mca mpi_yield_when_idle 1",
    ),
    Check(
        "threads",
        _pushing,
        "their threads push each other, and Horovod's own thread, off the cores",
        "OMP_NUM_THREADS with PyTorch, TF_NUM_INTRAOP_THREADS with TensorFlow",
    ),
    Check(
        "ranks differ",
        lambda case: _differing(case, strict=False),
        "the slowest rank sets the pace, and Horovod takes some settings from rank 0 only",
        "make it the same, if that is not meant",
    ),
    Check(
        "cycle time",
        _long_cycle,
        "every round of a bucket waits for the next cycle",
        "try HOROVOD_CYCLE_TIME=0.2 if steps are short, and measure it: every rank's Horovod thread wakes in "
        "every cycle, which costs where cores are short. --model and a profile predict what it is worth",
    ),
    Check(
        "response cache",
        lambda case: (
            "" if _cache(case) > 0 else f"none: HOROVOD_CACHE_CAPACITY={case.setting('CACHE_CAPACITY')}"
        ),
        _CACHED,
        "unset it, or a whole number, such as 2048",
    ),
    Check("response cache", _full_cache, _CACHED, "a larger HOROVOD_CACHE_CAPACITY, or fewer buckets"),
    *(
        Check(
            "accuracy",
            partial(_loses, optimizer),
            "what waits in a residual arrives late, and the optimizer goes on with it",
            remedy(optimizer),
        )
        for optimizer in ("momentum", "adamw")
    ),
    Check(
        "gain",
        lambda case: "" if case.verdict is None or case.verdict.answer == "yes" else _gain(case),
        "the model is too small, or the network too fast, for rounds of Horovod's to pay",
        'train densely, or tensor_selection="cost", which keeps what pays',
    ),
    Check(
        "profile",
        lambda case: iter(case.profile_differs),
        "predictions, and plans made from them, are off",
        _CALIBRATE,
    ),
)

#: of every topic what is said where no check finds anything; nothing where there is nothing to say
GOOD: dict[str, Callable[[Case], str]] = {
    "versions": lambda case: (
        f"Python {case.facts['python']}, "
        + ", ".join(f"{name} {number}" for name, number in case.facts["packages"].items())
    ),
    "Horovod": lambda case: f"built for {_and(_frameworks(case)[0])}",
    "kernels": lambda case: "host: numba" + ("; Triton is there for GPUs" if case.facts["triton"] else ""),
    "operations": lambda case: ", ".join(
        name.upper() for name, there in case.facts["built"].items() if there
    ),
    "device": lambda case: case.facts["cuda"] or "no GPU in use: selection is on the host",
    "launch": _launch,
    "pairs of ranks": lambda case: {
        "mpi": "MPI's own messages, thread level multiple",
        "gloo": "Horovod's collectives carry all rounds",
    }.get(case.facts["controller"], ""),
    "autotune": lambda case: "off",
    "stall check": lambda case: f"ends a run after {_gives_up(case):g} s",
    "levels": lambda case: _levels(case) if _even(case) else "",
    "shared memory": lambda case: (
        "the ranks of a host see each other's gradients"
        if case.levels != "flat" and _levels(case) and _even(case)
        else ""
    ),
    "threads": lambda case: _ranks_by_cores(case)[0][0],
    "ranks differ": lambda case: (
        "in nothing: versions, builds, settings and threads are the same on all"
        if len(case.everyone) > 1
        else ""
    ),
    "cycle time": _cycle,
    "response cache": _cache_words,
    "gain": _gain,
    "accuracy": lambda case: accuracy(case.recipe, case.optimizer) if case.recipe else "",
}
