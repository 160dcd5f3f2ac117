"""What the doctor makes of the facts: of an installation, of a launch, and of its ranks side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from horovod_sparse.carriers.shared_memory import MEMORY_VARIABLE
from horovod_sparse.carriers.transport_choice import TRANSPORT_VARIABLE
from horovod_sparse.checks import whole_number
from horovod_sparse.cli.doctor.facts import Finding, advice, good, problem
from horovod_sparse.cli.doctor.settings import is_own
from horovod_sparse.training.host_topology import RANKS_VARIABLE

Facts = Mapping[str, Any]

#: settings that have to be the same on all ranks, or they wait for each other
_STRICT = ("HOROVOD_CACHE_CAPACITY", "HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_CPU_OPERATIONS")


def check_threads(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Threads of the ranks of a host against the cores that they may use."""
    hosts: dict[str, list[Facts]] = {}
    for facts in everyone:
        hosts.setdefault(facts["host"], []).append(facts)
    for ranks in hosts.values():
        if found := list(_threads_of(ranks)):
            yield from found
            return  # of one host: the others are like it, or differ, which is said elsewhere
    first = next(iter(hosts.values()))
    yield good("threads", _threads_text(first))


def check_levels(everyone: Sequence[Facts], asked: str) -> Iterator[Finding]:
    """Whether hosts have several ranks, and the training makes use of that."""
    settings = everyone[0]["settings"]
    several = whole_number(settings.get(RANKS_VARIABLE, ""))
    counts: dict[object, int] = {}
    for rank, facts in enumerate(everyone):
        host = rank // several if several > 0 else facts["host"]
        counts[host] = counts.get(host, 0) + 1
    sizes = sorted(set(counts.values()))
    if len(counts) < 2 or sizes == [1]:
        return
    told = f"{len(counts)} hosts of {' or '.join(map(str, sizes))} ranks, levels={asked!r}"
    if len(sizes) > 1:
        if asked == "host":
            why = "two levels need as many ranks on every host: the first step will raise an error"
            yield problem("levels", told, why, "start as many ranks on each, or levels='flat'")
    elif asked == "flat":
        yield advice(
            "levels",
            told,
            "the ranks of a host share its network card, and each sends and selects for itself",
            "levels='host', which sums gradients within hosts first, where the network there is faster; "
            "horovod-sparse plan --per-host says what it is worth",
        )
    else:
        yield good("levels", told)
        if reason := next((facts["no_shared_memory"] for facts in everyone if facts["no_shared_memory"]), ""):
            yield advice(
                "shared memory",
                f"gradients are summed within hosts by messages: {reason}",
                "each gradient then goes through the loopback interface, several times slower",
                f"unset {MEMORY_VARIABLE}, and start the ranks of a host in one container",
            )
        else:
            yield good("shared memory", "the ranks of a host see each other's gradients")


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
    """What is not the same on all ranks."""
    strict: dict[str, list[str]] = {"Python": [str(facts["python"]) for facts in everyone]}
    strict[TRANSPORT_VARIABLE] = [_transport(facts) for facts in everyone]
    loose: dict[str, list[str]] = {}
    for name in sorted({name for facts in everyone for name in facts["packages"]}):
        strict[name] = [facts["packages"].get(name, "missing") for facts in everyone]
    for name in sorted({name for facts in everyone for name in facts["settings"]}):
        if not is_own(name) and name != TRANSPORT_VARIABLE:
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


_HOROVOD = "0.28.1"


def check_installation(facts: Facts, asked: str | None = None) -> Iterator[Finding]:
    """What is installed, and whether Horovod was built for it; one problem at most is Horovod's."""
    packages = facts["packages"]
    named = ", ".join(f"{name} {number}" for name, number in packages.items())
    yield good("versions", f"Python {facts['python']}, {named}")
    if "horovod" not in packages:
        yield problem(
            "Horovod",
            "not installed",
            "nothing can be synchronized",
            "scripts/setup in a clone of horovod_sparse builds it",
        )
        return
    if not packages["horovod"].startswith(_HOROVOD):
        yield advice(
            "Horovod",
            f"version {packages['horovod']}",
            f"horovod_sparse is tested with {_HOROVOD}",
            f"install {_HOROVOD}, or run scripts/test with yours",
        )
    yield from _bindings(facts, asked)
    if facts["numba"] is not None:
        yield problem(
            "kernels",
            f"those of the host do not run: {facts['numba']}",
            "selection and scattering need them",
            "install numba>=0.60 in a version that knows this NumPy, and let its cache folder be writable",
        )
    else:
        yield good("kernels", "host: numba" + ("; Triton is there for GPUs" if facts["triton"] else ""))


def _bindings(facts: Facts, asked: str | None) -> Iterator[Finding]:
    """Frameworks that are installed, and those that Horovod was built for."""
    packages = facts["packages"]
    names = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}
    variables = {"torch": "HOROVOD_WITH_PYTORCH=1", "tensorflow": "HOROVOD_WITH_TENSORFLOW=1"}
    built = [name for name in names if facts["bindings"][name]]
    installed = [name for name, known in names.items() if any(package in packages for package in known)]
    usable = [name for name in built if name in installed]
    if not usable or (asked is not None and asked not in usable):
        wanted = [asked] if asked is not None else installed or built or list(names)
        missing = " or ".join(f"horovod_sparse.{name}" for name in wanted)
        build = " ".join(variables[name] for name in wanted if name not in built)
        yield problem(
            "Horovod",
            f"built for {' and '.join(built) or 'no framework'}; "
            f"installed: {' and '.join(installed) or 'no framework'}",
            f"{missing} cannot be imported",
            f"build it with {build} (scripts/setup)"
            if build
            else f"install {' or '.join(wanted)}, in the version that Horovod was built with",
        )
        return
    for name in names:
        if name in installed and name not in built:
            yield advice(
                "Horovod",
                f"built without {name}, which is installed",
                f"horovod_sparse.{name} cannot be imported",
                f"build it with {variables[name]} (scripts/setup)",
            )
        if name in built and name not in installed:
            yield advice(
                "Horovod",
                f"built for {name}, which is not installed",
                f"horovod_sparse.{name} cannot be imported",
                f"install {name}, in the version that Horovod was built with",
            )
    yield good("Horovod", f"built for {' and '.join(built)}")


def check_launch(facts: Facts) -> Iterator[Finding]:
    """Controller, operations, and how messages between two ranks travel."""
    built, controller = facts["built"], facts["controller"]
    names = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL", "ddl": "DDL", "ccl": "CCL"}
    yield good("operations", ", ".join(text for name, text in names.items() if built[name]))
    yield good("device", facts["cuda"] or "no GPU in use: selection is on the host")
    if controller is not None:
        where = f"{facts['size']} ranks, {facts['local_size']} on this host, {facts['framework']}"
        yield good("launch", f"{where}, controller {controller}")
    if facts["cuda"] and not built["nccl"]:
        yield advice(
            "operations",
            f"there is a GPU ({facts['cuda']}), and Horovod is built without NCCL",
            "what stays dense is copied to the host to be summed, and back",
            "build it with HOROVOD_GPU_OPERATIONS=NCCL (scripts/setup --gpu)",
        )
    if facts["cuda"] and not facts["triton"]:
        yield advice(
            "kernels",
            f"there is a GPU ({facts['cuda']}), and Triton is missing",
            "selection runs in plain PyTorch, which passes over memory several times",
            "install triton, in the version that belongs to this PyTorch",
        )
    if controller == "mpi":
        yield from _pairs(facts)
    elif controller == "gloo":
        yield _pairs_beside_gloo(facts)
    if facts["size"] == 1:
        yield advice(
            "launch",
            "one rank" if facts["launched"] else "not launched",
            "controller, latency, threads and differences between ranks show under a launch of several",
            "run it as the training is run: horovodrun --gloo -np 2 horovod-sparse doctor",
        )


def _transport(facts: Facts) -> str:
    """What is asked for, as an optimizer reads it."""
    return facts["settings"].get(TRANSPORT_VARIABLE, "").strip() or "auto"


def _pairs_beside_gloo(facts: Facts) -> Finding:
    """Under Gloo Horovod's collectives carry everything."""
    if _transport(facts) != "pairs":
        return good("pairs of ranks", "Horovod's collectives carry all rounds")
    return problem(
        "pairs of ranks",
        f"{TRANSPORT_VARIABLE}=pairs, and Horovod runs on Gloo",
        "messages between pairs of ranks go over MPI alone: an optimizer refuses the setting",
        "unset it, or launch with MPI (horovodrun --mpi)",
    )


def _pairs(facts: Facts) -> Iterator[Finding]:
    """Whether exchanges can use MPI's own messages."""
    why = (
        "gTop-k, SparDL and others exchange messages between pairs: each round then takes a cycle of Horovod"
    )
    if _transport(facts) == "alltoall":
        yield advice(
            "pairs of ranks", "HOROVOD_SPARSE_TRANSPORT=alltoall", why, "unset it, or leave it at auto"
        )
    elif facts["thread_level"] is None:
        yield advice("pairs of ranks", "mpi4py is not installed", why, "pip install 'mpi4py>=4.0'")
    elif not facts["mpi_threads"] or facts["thread_level"] != "multiple":
        yield advice(
            "pairs of ranks",
            f"MPI was started with thread level {facts['thread_level']}, not multiple",
            why,
            "let hvd.init() start MPI (import mpi4py.MPI after it), with an MPI built for THREAD_MULTIPLE",
        )
    else:
        yield good("pairs of ranks", "MPI's own messages, thread level multiple")
