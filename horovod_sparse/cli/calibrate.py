"""`horovod-sparse calibrate`: measures collectives and selection under a launch, into a profile."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horovod_sparse.cli.console import show
from horovod_sparse.cli.launch import FRAMEWORKS, Launch, start
from horovod_sparse.cli.options import count, density, read_recipe, time
from horovod_sparse.errors import ArgumentError
from horovod_sparse.planning.calibration import QUICK, THOROUGH, Extent, calibration, needed_kinds
from horovod_sparse.planning.cost_model import Fit
from horovod_sparse.planning.profile import Profile
from horovod_sparse.sparsifiers import ALGORITHMS, Sparsifier

_DEFAULT = ("exdyna", "micro", "topk", "dragonn")
_USUAL_KINDS = {"allgather", "allreduce", "broadcast", "exchange"}
_COLUMNS = ("fixed ms", "ns per unit", "ns per selected", "points", "median error", "largest error")
#: a median error above which a fit is doubted
_DOUBTFUL = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = (
        "horovodrun --gloo -np 4 horovod-sparse ..., torchrun --nproc-per-node 4 -m horovod_sparse ..."
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
        profile = _measured(options, launch, sparsifiers, extent)
    finally:
        launch.end()
    if launch.rank == 0:
        _print(profile)
        profile.save(options.out)
        show(f"{options.out} written")
    return 0


def _asked(options: argparse.Namespace) -> tuple[list[Sparsifier], Extent]:
    """Returns what to measure, and how much of it; refuses before ranks are connected."""
    texts = options.sparsifier or list(_DEFAULT)
    texts = list(ALGORITHMS) if texts == ["all"] else texts
    sparsifiers = [read_recipe(text, options.density).sparsifier for text in texts]
    names = [sparsifier.name for sparsifier in sparsifiers]
    if len(set(names)) < len(names):
        raise ArgumentError("--sparsifier", names, "every name once: profiles keep times by name")
    extent = dataclasses.replace(QUICK, budget_seconds=10.0) if options.quick else THOROUGH
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


def _measured(
    options: argparse.Namespace, launch: Launch, sparsifiers: list[Sparsifier], extent: Extent
) -> Profile:
    device = launch.agreed(lambda: _device(options, launch))
    told = {"device": device, "sparsifiers": [one.describe() for one in sparsifiers], "extent": repr(extent)}
    everyone = launch.gathered(told)
    for rank, other in enumerate(everyone):  # ranks that measure different things would wait for each other
        for name in (name for name in told if other[name] != everyone[0][name]):
            raise ArgumentError(name, [everyone[0][name], other[name]], f"the same on ranks 0 and {rank}")
    cluster, topology, memory = launch.cluster(device), launch.topology(), None
    if device == "cuda":
        place = importlib.import_module("torch").device(device)
        memory = importlib.import_module("horovod_sparse.tensors.measuring").bucket_memory(place)
    if launch.rank == 0:
        text = f"{cluster.size} ranks, {cluster.framework}, controller {cluster.controller}"
        show(f"{text}, cycle {cluster.cycle_seconds * 1e3:g} ms, selection on {cluster.device}", style=1)
    measuring = calibration(
        cluster,
        sparsifiers,
        extent=extent,
        kinds=sorted(_USUAL_KINDS.union(needed_kinds(sparsifiers, launch.size))),
        memory=memory,
        topology=topology,
    )
    profile: Profile = launch.carry_out(measuring, topology)
    return profile


def _print(profile: Profile) -> None:
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
            show(f"\n{title}", style=1)
            show(" " * 12 + "".join(f"{column:>17}" for column in _COLUMNS))
        for name, fit in fits.items():
            slopes: Any = (f"{slope * 1e9:.3g}" for slope in (fit.seconds_per_unit, fit.seconds_per_selected))
            errors = f"{fit.median_error:.1%}", f"{fit.largest_error:.1%}"
            cells = f"{fit.fixed_seconds * 1e3:.3f}", *slopes, str(fit.num_points), *errors
            show(f"{name:12}" + "".join(f"{cell:>17}" for cell in cells))
            notes += fit.notes
            if fit.median_error > _DOUBTFUL:
                notes.append(
                    f"{title}, {name}: off by {fit.median_error:.0%} in the median: was the machine busy?"
                )
    for note in notes:
        show(f"note: {note}")
