"""`horovod-sparse calibrate`: measures collectives through Horovod, and selection, into a profile."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from horovod_sparse.checks import whole_number
from horovod_sparse.cli.console import console as make_console
from horovod_sparse.cli.console import is_launched, plain_table, show
from horovod_sparse.cli.options import density, read_recipe, time
from horovod_sparse.cli.ranks import FRAMEWORKS, Ranks, start
from horovod_sparse.errors import ArgumentError
from horovod_sparse.planning.calibration import QUICK, THOROUGH, Extent, calibration, needed_kinds
from horovod_sparse.planning.fitting import Fit
from horovod_sparse.planning.formulas import profile_at
from horovod_sparse.planning.profile import Profile
from horovod_sparse.plans.network import COLLECTIVES
from horovod_sparse.sparsifiers import ALGORITHMS, Sparsifier

_DEFAULT = ("exdyna", "micro", "topk", "dragonn")
#: more than a training's warm-up takes, which knows its one sparsifier
_QUICK_SECONDS = 10.0
#: of subsets of the ranks: enough to fix alpha
_SMALL = Extent((64, 1024, 8192), (1 << 10, 1 << 11, 1 << 12), 15, 10.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add = parser.add_argument
    parser.epilog = "Run it as the training is run: horovodrun --gloo -np 4 horovod-sparse calibrate"
    add("--framework", choices=FRAMEWORKS, help="to communicate through (default: torch if it is there)")
    text = f"may stand several times, or all (default: {', '.join(_DEFAULT)})"
    add("--sparsifier", action="append", metavar="NAME[:ARGUMENT=VALUE,...]", help=text)
    text = "kept fraction; four times that is measured, too (default: 0.001)"
    add("--density", type=density, default=0.001, help=text)
    kinds = ", ".join(sorted(set(COLLECTIVES.values())))
    text = (
        f"kinds with commas: {kinds} (default: allgather, allreduce, broadcast, exchange and what is needed)"
    )
    add("--collectives", metavar="KINDS", help=text)
    add("--device", choices=("cpu", "cuda"), help="where selection is (default: cuda where PyTorch has it)")
    add("--out", default="profile.json", metavar="FILE", help="written by rank 0 (default: %(default)s)")
    add("--quick", action="store_true", help="fewer sizes and repetitions: about 10 s")
    add("--repetitions", type=_count, metavar="N", help=f"of each size (default: {THOROUGH.repetitions})")
    text = f"for all; large sizes are left out when it is used up (default: {THOROUGH.budget_seconds:.0f}s)"
    add("--budget", type=time, metavar="TIME", help=text)
    text = "measure alpha among 2, 4, 8, ... of the ranks, too (as process sets, after all else)"
    add("--growth", action="store_true", help=text)


def _count(text: str) -> int:
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 1 or more")
    return number


def run(options: argparse.Namespace) -> int:
    """Measures on all ranks; rank 0 prints and writes."""
    sparsifiers, kinds, extent = _what(options)
    if options.device == "cuda" and options.framework == "tensorflow":
        raise ArgumentError("--device", "cuda", "cpu: with TensorFlow selection is on the host")
    if options.growth:  # Horovod reads it when it starts
        os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    ranks = start(options.framework)
    try:
        return _measure(options, ranks, sparsifiers, kinds, extent)
    finally:
        ranks.end()


def _what(options: argparse.Namespace) -> tuple[list[Sparsifier], tuple[str, ...] | None, Extent]:
    """What is measured, refused before Horovod is started."""
    texts = options.sparsifier or list(_DEFAULT)
    if texts == ["all"]:
        texts = list(ALGORITHMS)
    sparsifiers = [read_recipe(text, options.density).sparsifier for text in texts]
    names = [sparsifier.name for sparsifier in sparsifiers]
    if len(set(names)) < len(names):
        raise ArgumentError("--sparsifier", names, "every name once: profiles keep times by name")
    kinds = None
    if options.collectives is not None:
        kinds = tuple(kind.strip() for kind in options.collectives.split(","))
        for kind in kinds:
            if kind not in COLLECTIVES.values():
                raise ArgumentError("--collectives", kind, f"some of {', '.join(COLLECTIVES.values())}")
    extent = dataclasses.replace(QUICK, budget_seconds=_QUICK_SECONDS) if options.quick else THOROUGH
    changes: dict[str, Any] = {}
    if options.repetitions is not None:
        changes["repetitions"] = options.repetitions
    if options.budget is not None:
        changes["budget_seconds"] = options.budget
    return sparsifiers, kinds, dataclasses.replace(extent, **changes)


def _device(options: argparse.Namespace, ranks: Ranks) -> str:
    """Where selection is timed."""
    if ranks.framework == "tensorflow":
        return "cpu"
    available = bool(importlib.import_module("torch").cuda.is_available())
    if options.device == "cuda" and not available:
        raise ArgumentError("--device", "cuda", "cpu: PyTorch finds no GPU here")
    return options.device or ("cuda" if available else "cpu")


def _measure(
    options: argparse.Namespace,
    ranks: Ranks,
    sparsifiers: list[Sparsifier],
    kinds: tuple[str, ...] | None,
    extent: Extent,
) -> int:
    def prepared() -> str:
        if ranks.rank == 0 and not Path(options.out).resolve().parent.is_dir():
            raise ArgumentError("--out", options.out, "a file in a folder that exists")
        return _device(options, ranks)

    device = ranks.agreed(prepared)
    told = {"device": device, "sparsifiers": [one.describe() for one in sparsifiers], "extent": repr(extent)}
    ranks.agreed(lambda: _same(ranks.gathered({**told, "kinds": kinds})))
    if kinds is None:
        usual = ("allgather", "allreduce", "broadcast", "exchange")
        kinds = tuple(sorted({*usual, *needed_kinds(sparsifiers, ranks.size)}))
    console = make_console()
    if ranks.rank == 0:
        _introduce(console, ranks, device)
    topology = ranks.topology()
    with progress_of(ranks.rank) as tell:
        profile: Profile = ranks.carry_out(
            calibration(
                ranks.where(device=device),
                sparsifiers,
                extent=extent,
                kinds=kinds,
                memory=ranks.memory(device),
                on_progress=tell,
                topology=topology,
                training=ranks.training(device),
            ),
            name="calibration",
            topology=topology,
        )
    smaller = _growth(ranks, kinds) if options.growth else {}
    if ranks.rank == 0:
        _show(console, profile, smaller, options)
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
    where = ranks.where(device=device)
    text = f"{where.size} ranks, {where.framework}, controller {where.controller}"
    show(console, f"{text}, cycle {where.cycle_seconds * 1e3:g} ms, selection on {where.device}", "bold")
    if where.size == 1:
        how = "" if is_launched() else " (horovodrun --gloo -np 4 horovod-sparse calibrate)"
        text = "one rank alone communicates nothing: selection is measured, and the profile is for one rank"
        show(console, f"warning: {text}{how}", "yellow")


@contextmanager
def progress_of(rank: int) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on rank 0; a line for every tenth where there is no terminal, as under mpirun."""
    console = make_console(to_stderr=True)
    if rank != 0:
        yield lambda done, total, what: None
    elif not console.is_terminal:
        tenth = 0

        def tell(done: int, total: int, what: str) -> None:
            nonlocal tenth
            if (now := 10 * done // total) > tenth:
                tenth = now
                print(f"calibrating: {10 * tenth} % ({what})", file=console.file, flush=True)

        yield tell
    else:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting")
            yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _growth(ranks: Ranks, kinds: tuple[str, ...]) -> dict[int, Profile]:
    """Profiles of collectives among the first 2, 4, 8, ... ranks; empty on ranks that were in none."""
    found: dict[int, Profile] = {}
    size = 2
    while size < ranks.size:
        some = ranks.hvd.add_process_set(list(range(size)))
        if ranks.rank < size:
            coroutine = calibration(ranks.where(some), [], extent=_SMALL, kinds=kinds)
            found[size] = ranks.carry_out(coroutine, some, f"growth{size}")
        ranks.gathered(None)  # the others wait here
        ranks.hvd.remove_process_set(some)
        size *= 2
    return found


def _show(
    console: Console, profile: Profile, smaller: dict[int, Profile], options: argparse.Namespace
) -> None:
    if profile.collectives:
        console.print(collective_table(profile))
    if profile.levels:
        console.print(level_table(profile))
    console.print(sparsifier_table(profile))
    if profile.training:
        console.print(training_table(profile))
    if profile.size > 1:
        larger = [profile.size * 2**power for power in (1, 2, 4)]
        console.print(growth_table(profile, smaller, larger))
    for note in notes_of(profile):
        show(console, f"note: {note}", "yellow")


_QUALITY = ("points", "R2", "error", "largest")


def collective_table(profile: Profile) -> Table:
    """alpha and beta of every kind."""
    columns = ("of", "alpha ms", "beta ns/byte", "bytes/s", *_QUALITY)
    table = plain_table(
        f"Collectives of {profile.size} ranks, through Horovod, by the bytes that a rank puts in",
        columns,
        "error: of the fitted time, in the median and at most, over the sizes measured",
    )
    for kind, fit in profile.collectives.items():
        table.add_row(kind, *_times_of(fit))
    return table


def level_table(profile: Profile) -> Table:
    """alpha and beta of every kind, within hosts and between them."""
    columns = ("of", "among", "alpha ms", "beta ns/byte", "bytes/s", *_QUALITY)
    hosts = f"{profile.num_hosts} hosts of {profile.per_host} ranks"
    table = plain_table(
        f"Collectives with two levels, {hosts}",
        columns,
        "all hosts, or all ranks of each host, communicate at the same time",
    )
    for level, words in (("host", "the ranks of a host"), ("across", "one rank of each host")):
        for kind, fit in profile.levels[level].items():
            table.add_row(kind, words, *_times_of(fit))
    return table


def _times_of(fit: Fit) -> tuple[str, ...]:
    beta = fit.seconds_per_unit
    rate = _rate(1.0 / beta) if beta > 0.0 else "-"
    return f"{fit.fixed_seconds * 1e3:.3f}", f"{beta * 1e9:.4g}", rate, *_quality(fit)


def sparsifier_table(profile: Profile) -> Table:
    """Selection and decoding of every sparsifier."""
    columns = ("of", "what", "fixed us", "ns per element", "ns per selected", *_QUALITY)
    table = plain_table(
        f"Selection and decoding on {profile.device}",
        columns,
        "fold and selection; decoding and scattering, by what all ranks selected",
    )
    for name in profile.selection:
        for what, fits in (("selection", profile.selection), ("decoding", profile.decoding)):
            if name not in fits:
                continue
            fit = fits[name]
            table.add_row(
                name if what == "selection" else "",
                what,
                f"{fit.fixed_seconds * 1e6:.1f}",
                f"{fit.seconds_per_unit * 1e9:.3g}",
                f"{fit.seconds_per_selected * 1e9:.3g}",
                *_quality(fit),
            )
    return table


def training_table(profile: Profile) -> Table:
    """What a dense training does beside forward and backward."""
    columns = ("of", "fixed ms", "ns per unit", *_QUALITY)
    table = plain_table(
        f"A dense training on {profile.device}",
        columns,
        "allreduce, by bytes: of gradients in several tensors, copied into a buffer and back; start: of one "
        "tensor, on the thread of backward; update, by elements: of SGD with momentum",
    )
    for name, fit in profile.training.items():
        times = (f"{fit.fixed_seconds * 1e3:.3f}", f"{fit.seconds_per_unit * 1e9:.3g}")
        table.add_row(name, *times, *_quality(fit))
    return table


def growth_table(profile: Profile, measured: Mapping[int, Profile], sizes: Sequence[int]) -> Table:
    """How the start-up time of collectives grows with P."""
    kinds = list(profile.collectives)
    every = sorted({*measured, profile.size, *sizes})
    table = plain_table(
        "alpha in ms by the number of ranks",
        ("of", *(f"P = {size}" for size in every)),
        f"by the formulas of profile_at from P = {profile.size}; in brackets what was measured",
    )
    for kind in kinds:
        cells = []
        for size in every:
            text = f"{profile_at(profile, size).collectives[kind].fixed_seconds * 1e3:.3f}"
            if size in measured and kind in measured[size].collectives:
                text += f" ({measured[size].collectives[kind].fixed_seconds * 1e3:.3f})"
            cells.append(text)
        table.add_row(kind, *cells)
    return table


def notes_of(profile: Profile) -> list[str]:
    """What fits have to say (slopes cut off at 0), and which of them are bad."""
    notes: list[str] = []
    for what, fits in (
        ("", profile.collectives),
        ("selection of ", profile.selection),
        ("decoding of ", profile.decoding),
        ("", profile.training),
    ):
        for name, fit in fits.items():
            notes += fit.notes
            if fit.median_error > 0.3:
                notes.append(
                    f"{what}{name}: the model is off by {fit.median_error:.0%} in the median. Was the "
                    "machine busy? Repeat with more --repetitions"
                )
    return notes


def _quality(fit: Fit) -> tuple[str, ...]:
    return (
        str(fit.num_points),
        f"{fit.r_squared:.4f}",
        f"{fit.median_error:.1%}",
        f"{fit.largest_error:.1%}",
    )


def _rate(bytes_per_second: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if bytes_per_second >= unit:
            return f"{bytes_per_second / unit:.3g} {name}"
    return f"{bytes_per_second:.3g} B"
