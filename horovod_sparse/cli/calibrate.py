"""`horovod-sparse calibrate`: measures collectives and selection under a launch, into a profile."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from horovod_sparse.cli.console import console as make_console
from horovod_sparse.cli.console import launcher, show
from horovod_sparse.cli.launch import FRAMEWORKS, Launch, start
from horovod_sparse.cli.options import count, density, read_recipe, time
from horovod_sparse.errors import ArgumentError
from horovod_sparse.planning.calibration import QUICK, THOROUGH, Extent, calibration, needed_kinds
from horovod_sparse.planning.cost_model import Fit
from horovod_sparse.planning.profile import Profile
from horovod_sparse.sparsifiers import ALGORITHMS, Sparsifier

_DEFAULT = ("exdyna", "micro", "topk", "dragonn")
_USUAL_KINDS = ("allgather", "allreduce", "broadcast", "exchange")
#: seconds of --quick
_QUICK_SECONDS = 10.0
_COLUMNS = ("fixed ms", "ns per unit", "ns per selected", "points", "median error", "largest error")
#: a median error above which a fit is doubted
_DOUBTFUL = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = (
        "Run it as the training is run: horovodrun --gloo -np 4 horovod-sparse calibrate, or "
        "torchrun --nproc-per-node 4 -m horovod_sparse calibrate"
    )
    add("--framework", choices=FRAMEWORKS, help="to communicate through (default: torch if it is there)")
    text = f"may stand several times, or all (default: {', '.join(_DEFAULT)})"
    add("--sparsifier", action="append", metavar="NAME[:ARGUMENT=VALUE,...]", help=text)
    text = "kept fraction; four times that is measured, too (default: 0.001)"
    add("--density", type=density, default=0.001, help=text)
    add("--device", choices=("cpu", "cuda"), help="where selection is (default: cuda where PyTorch has it)")
    add("--out", default="profile.json", metavar="FILE", help="written by rank 0 (default: %(default)s)")
    add("--quick", action="store_true", help="fewer sizes and repetitions: about 10 s")
    add("--repetitions", type=count, metavar="N", help=f"of each size (default: {THOROUGH.repetitions})")
    text = f"for all; large sizes are left out when it is used up (default: {THOROUGH.budget_seconds:.0f}s)"
    add("--budget", type=time, metavar="TIME", help=text)


def run(options: argparse.Namespace) -> int:
    """Measures on all ranks; rank 0 prints and writes."""
    sparsifiers, extent = _asked(options)
    if options.device == "cuda" and options.framework == "tensorflow":
        raise ArgumentError("--device", "cuda", "cpu: with TensorFlow selection is on the host")
    launch = start(options.framework)
    try:
        _measure(options, launch, sparsifiers, extent)
    finally:
        launch.end()
    return 0


def _asked(options: argparse.Namespace) -> tuple[list[Sparsifier], Extent]:
    """Returns what to measure, and how much of it; refuses before ranks are connected."""
    texts = options.sparsifier or list(_DEFAULT)
    if texts == ["all"]:
        texts = list(ALGORITHMS)
    sparsifiers = [read_recipe(text, options.density).sparsifier for text in texts]
    names = [sparsifier.name for sparsifier in sparsifiers]
    if len(set(names)) < len(names):
        raise ArgumentError("--sparsifier", names, "every name once: profiles keep times by name")
    extent = dataclasses.replace(QUICK, budget_seconds=_QUICK_SECONDS) if options.quick else THOROUGH
    given = {"repetitions": options.repetitions, "budget_seconds": options.budget}
    changes = {name: value for name, value in given.items() if value is not None}
    return sparsifiers, dataclasses.replace(extent, **changes)


def _device(options: argparse.Namespace, launch: Launch) -> str:
    if launch.rank == 0 and not Path(options.out).resolve().parent.is_dir():
        raise ArgumentError("--out", options.out, "a file in a folder that exists")
    if launch.framework == "tensorflow":
        return "cpu"
    available = bool(importlib.import_module("torch").cuda.is_available())
    if options.device == "cuda" and not available:
        raise ArgumentError("--device", "cuda", "cpu: PyTorch finds no GPU here")
    return options.device or ("cuda" if available else "cpu")


def _measure(
    options: argparse.Namespace, launch: Launch, sparsifiers: list[Sparsifier], extent: Extent
) -> None:
    device = launch.agreed(lambda: _device(options, launch))
    told = {"device": device, "sparsifiers": [one.describe() for one in sparsifiers], "extent": repr(extent)}
    launch.agreed(lambda: _refuse_others(launch.gathered(told)))
    cluster, topology, memory = launch.cluster(device), launch.topology(), None
    if device == "cuda":
        place = importlib.import_module("torch").device(device)
        memory = importlib.import_module("horovod_sparse.tensors.measuring").bucket_memory(place)
    console = make_console()
    if launch.rank == 0:
        cycle = f", cycle {cluster.cycle_seconds * 1e3:g} ms" if cluster.cycle_seconds else ""
        text = f"{cluster.size} ranks, {cluster.framework}, controller {cluster.controller}{cycle}"
        show(console, f"{text}, selection on {cluster.device}", "bold")
        if cluster.size == 1:
            how = "" if launcher() else " (horovodrun --gloo -np 4 horovod-sparse calibrate)"
            text = (
                "one rank alone communicates nothing: selection is measured, and the profile is for one rank"
            )
            show(console, f"warning: {text}{how}", "yellow")
    with _progress(launch.rank) as tell:
        profile: Profile = launch.carry_out(
            calibration(
                cluster,
                sparsifiers,
                extent=extent,
                kinds=sorted({*_USUAL_KINDS, *needed_kinds(sparsifiers, launch.size)}),
                memory=memory,
                on_progress=tell,
                topology=topology,
            ),
            topology,
        )
    if launch.rank == 0:
        _print(profile, console)
        profile.save(options.out)
        show(console, f"{options.out} written")


def _refuse_others(everyone: list[Any]) -> None:
    """Refuses ranks that would measure different things, as they would wait for each other."""
    for rank, other in enumerate(everyone):
        differing = [name for name in other if other[name] != everyone[0][name]]
        if differing:
            given = [everyone[0][differing[0]], other[differing[0]]]
            raise ArgumentError(differing[0], given, f"the same on ranks 0 and {rank}")


@contextmanager
def _progress(rank: int) -> Iterator[Callable[[int, int, str], None]]:
    """Shows a progress bar on rank 0; its last line alone, where ranks have no terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=make_console(to_stderr=True), disable=rank != 0) as bar:
        task = bar.add_task("calibrating")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _print(profile: Profile, console: Console) -> None:
    """Prints every fit with its error, and what is wrong with fits."""
    hosts = f"{profile.num_hosts} hosts of {profile.per_host} ranks"
    groups: dict[str, Mapping[str, Fit]] = {
        f"Collectives of {profile.size} ranks, by bytes that a rank puts in": profile.collectives,
        f"Collectives within {hosts}, all hosts at a time": profile.levels.get("host", {}),
        f"Collectives between {hosts}, all groups at a time": profile.levels.get("across", {}),
        f"Fold and selection on {profile.device}, by elements": profile.selection,
        f"Decoding and scattering on {profile.device}, by elements and what was selected": profile.decoding,
    }
    notes: list[str] = []
    for title, fits in groups.items():
        if fits:
            show(console, f"\n{title}", "bold")
            show(console, " " * 12 + "".join(f"{column:>17}" for column in _COLUMNS))
        for name, fit in fits.items():
            slopes = (f"{slope * 1e9:.3g}" for slope in (fit.seconds_per_unit, fit.seconds_per_selected))
            errors = f"{fit.median_error:.1%}", f"{fit.largest_error:.1%}"
            cells = f"{fit.fixed_seconds * 1e3:.3f}", *slopes, str(fit.num_points), *errors
            show(console, f"{name:12}" + "".join(f"{cell:>17}" for cell in cells))
            notes += fit.notes
            if fit.median_error > _DOUBTFUL:
                busy = "was the machine busy? Repeat with more --repetitions"
                notes.append(f"{title}, {name}: off by {fit.median_error:.0%} in the median: {busy}")
    for note in notes:
        show(console, f"note: {note}", "yellow")
