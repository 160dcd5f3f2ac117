"""`horovod-sparse calibrate`: measures collectives and selection under a launch, into a profile."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horovod_sparse.cli.launch import FRAMEWORKS, RankConnection, connect_ranks
from horovod_sparse.cli.main import count, time
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback.recipe import parse_arguments, parse_recipe
from horovod_sparse.planning.calibration import QUICK, THOROUGH, Extent, calibration, needed_kinds
from horovod_sparse.planning.model import Fit
from horovod_sparse.planning.profile import Profile
from horovod_sparse.sparsifiers import ALGORITHMS, Sparsifier
from horovod_sparse.training.agreement import compare
from horovod_sparse.training.checkpoint import call_on_all

_DEFAULT = ("exdyna", "micro", "topk", "dragonn")
_USUAL_KINDS = {"allgather", "allreduce", "broadcast", "exchange"}
_COLUMNS = ("fixed ms", "ns per unit", "ns per selected", "points", "median error", "largest error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = (
        "horovodrun --gloo -np 4 horovod-sparse ..., torchrun --nproc-per-node 4 -m horovod_sparse ..."
    )
    add("--framework", choices=FRAMEWORKS, help="whose collectives to measure (default: torch if installed)")
    text = f"may stand several times, or all (default: {', '.join(_DEFAULT)})"
    add("--sparsifier", action="append", metavar="NAME[:ARGUMENT=VALUE,...]", help=text)
    text = "kept fraction; four times that is measured, too (default: 0.001)"
    add("--density", type=float, default=0.001, help=text)
    add("--device", choices=("cpu", "cuda"), help="device that selects (default: cuda if PyTorch has it)")
    add("--out", default="profile.json", metavar="FILE", help="written by rank 0 (default: %(default)s)")
    add("--quick", action="store_true", help="fewer sizes and repetitions: about 10 s")
    add("--repetitions", type=count, metavar="N", help=f"runs of each size (default: {THOROUGH.repetitions})")
    text = f"for all; large sizes are left out when it is used up (default: {THOROUGH.budget_seconds:.0f}s)"
    add("--budget", type=time, metavar="TIME", help=text)


def run(options: argparse.Namespace) -> int:
    """Measures the cluster on all ranks; rank 0 prints and writes the profile. Returns the exit code."""
    sparsifiers, extent = _parse_options(options)
    if options.device == "cuda" and options.framework == "tensorflow":
        raise ArgumentError("--device", "cuda", "cpu: with TensorFlow selection is on the host")
    launch = connect_ranks(options.framework)
    try:
        profile = _measure(options, launch, sparsifiers, extent)
    finally:
        launch.end()
    if launch.placement.rank == 0:
        _print(profile)
        profile.save(options.out)
        print(f"{options.out} written")
    return 0


def _parse_options(options: argparse.Namespace) -> tuple[list[Sparsifier], Extent]:
    """Returns the sparsifiers and sizes to measure; raises on wrong options before ranks are connected."""
    texts = options.sparsifier or list(_DEFAULT)
    texts = list(ALGORITHMS) if texts == ["all"] else texts
    sparsifiers = [_parsed_sparsifier(text, options.density) for text in texts]
    names = [sparsifier.name for sparsifier in sparsifiers]
    if len(set(names)) < len(names):
        raise ArgumentError("--sparsifier", names, "every name once: profiles keep times by name")
    extent = dataclasses.replace(QUICK, budget_seconds=10.0) if options.quick else THOROUGH
    given = {"repetitions": options.repetitions, "budget_seconds": options.budget}
    changes = {name: value for name, value in given.items() if value is not None}
    return sparsifiers, dataclasses.replace(extent, **changes)


def _parsed_sparsifier(text: str, density: float) -> Sparsifier:
    """Returns the sparsifier that a user's text describes, with --density where it has none."""
    name, _, arguments = text.partition(":")
    has_density = name not in ALGORITHMS or ALGORITHMS[name].has_density
    if has_density and "density" not in parse_arguments(arguments):
        arguments = f"density={density!r}" + ("," if arguments else "") + arguments
    return parse_recipe(f"{name}:{arguments}").sparsifier


def _checked_device(options: argparse.Namespace, launch: RankConnection) -> str:
    out = Path(options.out).resolve()
    if launch.placement.rank == 0 and (out.is_dir() or not os.access(out.parent, os.W_OK)):
        raise ArgumentError("--out", options.out, "a file in a folder that can be written")
    if launch.framework == "tensorflow":
        return "cpu"
    available = bool(importlib.import_module("torch").cuda.is_available())
    if options.device == "cuda" and not available:
        raise ArgumentError("--device", "cuda", "cpu: PyTorch finds no GPU here")
    return options.device or ("cuda" if available else "cpu")


def _measure(
    options: argparse.Namespace, launch: RankConnection, sparsifiers: list[Sparsifier], extent: Extent
) -> Profile:
    device = launch.carry_out(call_on_all(lambda: _checked_device(options, launch), "begin"))
    # ranks that measure different things would wait for each other
    told = {"device": device, "sparsifiers": str([one.describe() for one in sparsifiers])}
    launch.carry_out(compare({**told, "extent": repr(extent)}))
    cluster, memory = launch.cluster(device), None
    if device == "cuda":
        place = importlib.import_module("torch").device(device)
        memory = importlib.import_module("horovod_sparse.tensors.measuring").bucket_memory(place)
    if launch.placement.rank == 0:
        text = f"{cluster.size} ranks, {cluster.framework}, controller {cluster.controller}"
        print(f"{text}, cycle {cluster.cycle_seconds * 1e3:g} ms, selection on {cluster.device}", flush=True)
    kinds = sorted(_USUAL_KINDS | needed_kinds(sparsifiers, cluster.size))
    more: dict[str, Any] = {"extent": extent, "kinds": kinds, "memory": memory}
    profile: Profile = launch.carry_out(calibration(cluster, sparsifiers, **more))
    return profile


def _print(profile: Profile) -> None:
    """Prints every fitted time with its error."""
    groups: dict[str, Mapping[str, Fit]] = {
        "Through all ranks": profile.collectives,
        "Selection": profile.selection,
        "Decoding": profile.decoding,
    }
    print(" " * 32 + "".join(f"{column:>17}" for column in _COLUMNS))
    for group, name, fit in ((group, *item) for group, fits in groups.items() for item in fits.items()):
        slopes = f"{fit.seconds_per_unit * 1e9:.3g}", f"{fit.seconds_per_selected * 1e9:.3g}"
        errors = f"{fit.median_error:.1%}", f"{fit.largest_error:.1%}"
        cells = f"{fit.fixed_seconds * 1e3:.3f}", *slopes, str(fit.num_points), *errors
        print(f"{group + ', ' + name:32}" + "".join(f"{cell:>17}" for cell in cells))
