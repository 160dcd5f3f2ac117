"""`horovod-sparse doctor`: looks at an installation, its settings, and a launch."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import os
import platform
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from horovod_sparse.cli.console import console as make_console
from horovod_sparse.cli.console import is_launched, show
from horovod_sparse.cli.doctor_checks import Case, Finding, cycle_of, examine
from horovod_sparse.cli.ranks import FRAMEWORKS, Ranks, bindings, start, usable_framework
from horovod_sparse.collectives import AllGather, Synchronization
from horovod_sparse.errors import HorovodMissingError
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.planning.calibration.collectives import Stopwatch
from horovod_sparse.training.deadline import seconds_of_horovod
from horovod_sparse.training.settings import LEVELS

_PACKAGES = "horovod-sparse horovod torch tensorflow tensorflow-cpu keras tf-keras numpy numba mpi4py triton"
_REPETITIONS = 25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = "Exit code 1 if there is a problem. Run it as the training is run: mpirun -np 4 ..."
    add("--framework", choices=FRAMEWORKS, help="to look at (default: torch if it is there)")
    text = "of the training, for its rounds (default: %(default)s)"
    add("--sparsifier", default="exdyna", metavar="NAME[:ARGUMENT=VALUE,...]", help=text)
    add("--levels", choices=LEVELS, default="flat", help="of the training (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Looks and prints; under a launch rank 0 prints."""
    recipe = parse_recipe(options.sparsifier)
    ranks: Ranks | None = None
    missing, facts = "", local_facts()
    everyone: list[Mapping[str, Any]] = [facts]
    try:
        framework = usable_framework(options.framework)
        if facts["launched"]:
            ranks = start(framework)
            everyone = ranks.gathered({**facts, **rank_facts(ranks)})
        else:
            everyone = [{**facts, **build_facts(framework)}]
    except HorovodMissingError as error:
        # a rank without Horovod cannot tell the others; what the rest of the launch does is the launcher's
        missing = str(error).partition(". ")[0]
        if options.framework is None and importlib.util.find_spec("torch") is not None:
            everyone = [{**facts, **framework_facts("torch")}]
    finally:
        if ranks is not None:
            ranks.end()
    findings = examine(Case(everyone, options.framework, recipe, options.levels))
    if missing and not any(one.topic == "Horovod" and one.level != "good" for one in findings):
        do = "scripts/setup in a clone of horovod_sparse builds it"  # it is there, and cannot be loaded
        findings.append(Finding("problem", "Horovod", missing, "nothing can be synchronized", do))
    if ranks is None or ranks.rank == 0:
        _show(make_console(), findings)
    return int(any(finding.level == "problem" for finding in findings))


def _show(to: Console, findings: Iterable[Finding]) -> None:
    """Problems first, then advice, then what is good; each with its reason and remedy."""
    styles = {"problem": ("x", "bold red"), "advice": ("!", "yellow"), "good": ("+", "green")}
    found = sorted(findings, key=lambda finding: list(styles).index(finding.level))
    show(to, "horovod-sparse doctor", "bold")
    for finding in found:
        sign, style = styles[finding.level]
        show(to, f"{sign} {finding.topic}: {finding.what}", style)
        if finding.why:
            show(to, f"    why  {finding.why}")
            show(to, f"    do   {finding.do}")
    problems, advised, good = (sum(one.level == level for one in found) for level in styles)
    text = f"{problems} problem{'' if problems == 1 else 's'}, {advised} piece{'' if advised == 1 else 's'}"
    show(to, f"{text} of advice, {good} good", "bold")


def local_facts() -> dict[str, Any]:
    """What a process can tell without Horovod, in plain values; what Horovod tells besides has a default."""
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
        "launched": is_launched(),
        "settings": {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")},
        # what horovod_sparse sets when it is imported, where nothing else is said
        "gives_up": seconds_of_horovod(),
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
        if importlib.util.find_spec("mpi4py") is not None:
            level = importlib.import_module("mpi4py.MPI").Query_thread()
            facts["thread_level"] = ("single", "funneled", "serialized", "multiple")[level]
    if ranks.size > 1:
        facts["latency_seconds"] = ranks.carry_out(latency_of(ranks))
    return facts


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
