"""`horovod-sparse calibrate`: measures collectives through Horovod, and selection, into a profile."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from horovod_sparse.cli.console import console as make_console
from horovod_sparse.cli.console import is_launched, plain_table, show
from horovod_sparse.cli.options import count, density, read_recipe, time
from horovod_sparse.cli.ranks import FRAMEWORKS, Ranks, start
from horovod_sparse.errors import ArgumentError
from horovod_sparse.planning.calibration import QUICK, THOROUGH, Extent, calibration, needed_kinds
from horovod_sparse.planning.profile import Profile
from horovod_sparse.sparsifiers import ALGORITHMS, Sparsifier

_DEFAULT = ("exdyna", "micro", "topk", "dragonn")
#: more than a training's warm-up takes, which knows its one sparsifier
_QUICK_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = "Run it as the training is run: horovodrun --gloo -np 4 horovod-sparse calibrate"
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
    sparsifiers, extent = _what(options)
    if options.device == "cuda" and options.framework == "tensorflow":
        raise ArgumentError("--device", "cuda", "cpu: with TensorFlow selection is on the host")
    ranks = start(options.framework)
    try:
        return _measure(options, ranks, sparsifiers, extent)
    finally:
        ranks.end()


def _what(options: argparse.Namespace) -> tuple[list[Sparsifier], Extent]:
    """What is measured, refused before Horovod is started."""
    texts = options.sparsifier or list(_DEFAULT)
    if texts == ["all"]:
        texts = list(ALGORITHMS)
    sparsifiers = [read_recipe(text, options.density).sparsifier for text in texts]
    names = [sparsifier.name for sparsifier in sparsifiers]
    if len(set(names)) < len(names):
        raise ArgumentError("--sparsifier", names, "every name once: profiles keep times by name")
    extent = dataclasses.replace(QUICK, budget_seconds=_QUICK_SECONDS) if options.quick else THOROUGH
    changes: dict[str, Any] = {}
    if options.repetitions is not None:
        changes["repetitions"] = options.repetitions
    if options.budget is not None:
        changes["budget_seconds"] = options.budget
    return sparsifiers, dataclasses.replace(extent, **changes)


def _device(options: argparse.Namespace, ranks: Ranks) -> str:
    if ranks.framework == "tensorflow":
        return "cpu"
    available = bool(importlib.import_module("torch").cuda.is_available())
    if options.device == "cuda" and not available:
        raise ArgumentError("--device", "cuda", "cpu: PyTorch finds no GPU here")
    return options.device or ("cuda" if available else "cpu")


def _measure(options: argparse.Namespace, ranks: Ranks, sparsifiers: list[Sparsifier], extent: Extent) -> int:
    def prepared() -> str:
        if ranks.rank == 0 and not Path(options.out).resolve().parent.is_dir():
            raise ArgumentError("--out", options.out, "a file in a folder that exists")
        return _device(options, ranks)

    device = ranks.agreed(prepared)
    told = {"device": device, "sparsifiers": [one.describe() for one in sparsifiers], "extent": repr(extent)}
    ranks.agreed(lambda: _same(ranks.gathered(told)))
    usual = ("allgather", "allreduce", "broadcast", "exchange")
    console = make_console()
    if ranks.rank == 0:
        _introduce(console, ranks, device)
    topology = ranks.topology()
    with progress_of(ranks.rank) as tell:
        profile: Profile = ranks.carry_out(
            calibration(
                ranks.where(device),
                sparsifiers,
                extent=extent,
                kinds=sorted({*usual, *needed_kinds(sparsifiers, ranks.size)}),
                memory=ranks.memory(device),
                on_progress=tell,
                topology=topology,
                training=ranks.training(device),
            ),
            name="calibration",
            topology=topology,
        )
    if ranks.rank == 0:
        for table in tables_of(profile):
            console.print(table)
        for note in notes_of(profile):
            show(console, f"note: {note}", "yellow")
        profile.save(options.out)
        show(console, f"{options.out} written")
    return 0


def _same(everyone: list[Any]) -> None:
    """Refuses ranks that would measure different things: they would wait for each other."""
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            differing = [name for name in other if other[name] != everyone[0][name]]
            given = [everyone[0][differing[0]], other[differing[0]]]
            raise ArgumentError(differing[0], given, f"the same on ranks 0 and {rank}")


def _introduce(console: Console, ranks: Ranks, device: str) -> None:
    where = ranks.where(device)
    text = f"{where.size} ranks, {where.framework}, controller {where.controller}"
    show(console, f"{text}, cycle {where.cycle_seconds * 1e3:g} ms, selection on {where.device}", "bold")
    if where.size == 1:
        how = "" if is_launched() else " (horovodrun --gloo -np 4 horovod-sparse calibrate)"
        text = "one rank alone communicates nothing: selection is measured, and the profile is for one rank"
        show(console, f"warning: {text}{how}", "yellow")


@contextmanager
def progress_of(rank: int) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on rank 0's terminal; under mpirun, where there is none, the last line of it."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=make_console(to_stderr=True), disable=rank != 0) as bar:
        task = bar.add_task("calibrating")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


_COLUMNS = ("of", "fixed ms", "ns per unit", "ns per selected", "points", "R2", "error", "largest")


def tables_of(profile: Profile) -> list[Table]:
    """Every fitted time, and how well it fits: the error in the median and at most, over all sizes."""
    put, hosts = "by bytes that a rank puts in", f"{profile.num_hosts} hosts of {profile.per_host} ranks"
    groups = {
        f"Collectives of {profile.size} ranks, through Horovod, {put} (alpha and beta)": profile.collectives,
        f"Collectives within {hosts}, all hosts at a time, {put}": profile.levels.get("host", {}),
        f"Collectives between {hosts}, all groups at a time, {put}": profile.levels.get("across", {}),
        f"Fold and selection on {profile.device}, by elements": profile.selection,
        f"Decoding and scattering on {profile.device}, by elements and what was selected": profile.decoding,
        f"A dense training on {profile.device}: allreduce by bytes, update by elements": profile.training,
    }
    tables = []
    for title, fits in groups.items():
        table = plain_table(title, _COLUMNS)
        for name, fit in fits.items():
            slopes = (fit.seconds_per_unit, fit.seconds_per_selected)
            table.add_row(
                name,
                f"{fit.fixed_seconds * 1e3:.3f}",
                *(f"{slope * 1e9:.3g}" for slope in slopes),
                str(fit.num_points),
                f"{fit.r_squared:.4f}",
                f"{fit.median_error:.1%}",
                f"{fit.largest_error:.1%}",
            )
        if fits:
            tables.append(table)
    return tables


def notes_of(profile: Profile) -> list[str]:
    """What fits have to say (slopes cut off at 0), and which of them are bad."""
    notes: list[str] = []
    groups = {"": {**profile.collectives, **profile.training}}
    groups |= {"selection of ": {**profile.selection}, "decoding of ": {**profile.decoding}}
    for what, fits in groups.items():
        for name, fit in fits.items():
            notes += fit.notes
            if fit.median_error > 0.3:
                notes.append(
                    f"{what}{name}: the model is off by {fit.median_error:.0%} in the median. Was the "
                    "machine busy? Repeat with more --repetitions"
                )
    return notes
