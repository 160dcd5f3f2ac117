"""`horovod-sparse doctor`: looks at an installation, its settings, and a launch."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod_sparse.cli.console import console as make_console
from horovod_sparse.cli.console import show
from horovod_sparse.cli.doctor.checks import (
    check_differences,
    check_installation,
    check_launch,
    check_levels,
    check_threads,
)
from horovod_sparse.cli.doctor.cycle import check_cache, check_cycle, check_gain, forecast, num_names
from horovod_sparse.cli.doctor.facts import (
    Finding,
    advice,
    build_facts,
    cycle_of,
    local_facts,
    print_findings,
    problem,
    rank_facts,
)
from horovod_sparse.cli.doctor.settings import check_settings
from horovod_sparse.cli.model import FORMAT, Model, read_model
from horovod_sparse.cli.options import density, read_merging, read_recipe
from horovod_sparse.cli.ranks import FRAMEWORKS, Ranks, start, usable_framework
from horovod_sparse.errors import HorovodMissingError, HorovodSparseError, ProfileMismatchError
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning.calibration import QUICK, calibration, needed_kinds
from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.planning.formulas import profile_at
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.request import needs_times
from horovod_sparse.planning.strategies import Strategy
from horovod_sparse.planning.times import AffineTime
from horovod_sparse.planning.workload import LAYER_TABLES
from horovod_sparse.plans.plan import Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.training.settings import LEVELS


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What the doctor is told about the training."""

    recipe: Recipe
    merging: Strategy | Plan
    model: Model | None
    profile: Profile | None
    levels: str = "flat"

    @property
    def sparsifier(self) -> Sparsifier:
        """Of the recipe."""
        return self.recipe.sparsifier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add = parser.add_argument
    parser.epilog = "Exit code 1 if there is a problem. Run it as the training is run: mpirun -np 4 ..."
    add("--framework", choices=FRAMEWORKS, help="to look at (default: torch if it is there)")
    tables = ", ".join(LAYER_TABLES)
    text = f"of the training, for names and the cycle time: {tables}; or a file .json: {FORMAT}"
    add("--model", metavar="TABLE|FILE", help=text)
    add("--sparsifier", default="exdyna", metavar="NAME[:ARGUMENT=VALUE,...]", help="default: %(default)s")
    add("--density", type=density, default=0.001, help="default: %(default)s")
    add("--merging", default="optimal", metavar="STRATEGY", help="as in plan (default: %(default)s)")
    add("--levels", choices=LEVELS, default="flat", help="of the training (default: %(default)s)")
    text = "of horovod-sparse calibrate; without it a few seconds are measured under a launch"
    add("--profile", metavar="FILE", help=text)


def run(options: argparse.Namespace) -> int:
    """Looks and prints; under a launch rank 0 prints."""
    recipe, merging = read_recipe(options.sparsifier, options.density), read_merging(options.merging)
    recipe.refuse_auto("doctor")
    model = None if options.model is None else read_model(options.model)
    facts = local_facts()
    ranks: Ranks | None = None
    missing = ""
    try:
        framework = usable_framework(options.framework)
        if facts["launched"]:
            ranks = start(framework)
            everyone = ranks.gathered({**facts, **rank_facts(ranks)})
        else:
            everyone = [{**facts, **build_facts(framework)}]
    except HorovodMissingError as error:
        # a rank without Horovod cannot tell the others; what the rest of the launch does is the launcher's
        everyone, missing = [], str(error).partition(". ")[0]
    try:
        profile = _profile(options.profile, ranks)
        asked = _Asked(recipe, merging, model, profile, options.levels)
        facts = everyone[0] if everyone else facts
        findings = [*check_installation(facts, options.framework), *check_settings(facts)]
        if everyone:
            findings += _findings(facts, everyone, asked, ranks)
    finally:
        if ranks is not None:
            ranks.end()
    known = any(finding.level == "problem" and finding.topic == "Horovod" for finding in findings)
    if missing and not known:  # it is there, built, and cannot be loaded
        do = "scripts/setup in a clone of horovod_sparse builds it"
        findings.append(problem("Horovod", missing, "nothing can be synchronized", do))
    if ranks is None or ranks.rank == 0:
        console = make_console()
        show(console, "horovod-sparse doctor", "bold")
        print_findings(console, findings)
    return int(any(finding.level == "problem" for finding in findings))


def _profile(path: str | None, ranks: Ranks | None) -> Profile | None:
    if path is None:
        return None
    if ranks is None:
        return Profile.load(path)
    loaded: Profile = ranks.agreed(lambda: Profile.load(path))
    return loaded


def _findings(
    facts: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]], asked: _Asked, ranks: Ranks | None
) -> list[Finding]:
    """What is found of a Horovod that works; the same on every rank, since all look at the facts of all."""
    found = [*check_launch(facts), *check_threads(everyone), *check_levels(everyone, asked.levels)]
    found += check_differences(everyone)
    num_rounds = len(asked.sparsifier.rounds(max(2, facts["size"])))
    profile, more = _usable_profile(facts, asked)
    found += more
    known = all(cycle_of(other["settings"]) is not None for other in everyone)
    if profile is None and asked.model is not None and ranks is not None and ranks.size > 1 and known:
        profile = _short_measurement(ranks, asked.sparsifier)
    predicted, names = _predictions(facts, asked, profile)
    found += check_cycle(facts, num_rounds, predicted)
    found += check_cache(facts, names, num_rounds)
    if profile is not None and profile.size > 1 and predicted is not None and asked.model is not None:
        found += check_gain(profile, asked.model.workload(profile), asked.recipe)
    return found


def _usable_profile(facts: Mapping[str, Any], asked: _Asked) -> tuple[Profile | None, list[Finding]]:
    """The profile for this number of ranks, and what differs from here."""
    profile = asked.profile
    if profile is None:
        return None, []
    size = facts["size"] if facts["size"] > 1 else profile.size
    cycle = cycle_of(facts["settings"])
    try:
        differences = profile.check(
            size=size,
            framework=facts["framework"],
            controller=facts["controller"],
            cycle_seconds=None if cycle is None else cycle * 1e-3,
        )
        usable = profile_at(profile, size)
        usable.cost(asked.sparsifier)
    except ProfileMismatchError as error:
        why = "it cannot be applied here, and ranks that load it would refuse it"
        return None, [
            problem("profile", str(error), why, "horovod-sparse calibrate, as the training is launched")
        ]
    why = "predictions, and plans made from them, are off"
    do = "horovod-sparse calibrate, as the training is launched"
    return usable, [advice("profile", text, why, do) for text in differences]


def _short_measurement(ranks: Ranks, sparsifier: Sparsifier) -> Profile:
    """A profile of a few seconds; a collective."""
    kinds = needed_kinds([sparsifier], ranks.size)
    extent = dataclasses.replace(QUICK, repetitions=5)
    profile: Profile = ranks.carry_out(
        calibration(ranks.where(), [sparsifier], extent=extent, kinds=kinds), name="doctor"
    )
    return profile


def _predictions(
    facts: Mapping[str, Any], asked: _Asked, profile: Profile | None
) -> tuple[Callable[[float], float] | None, int | None]:
    """Seconds by cycle time, and number of names; None where there is nothing to go by."""
    if asked.model is None:
        return None, None
    size = max(2, facts["size"])
    merging = asked.merging
    if profile is None:
        if not isinstance(merging, Plan):
            if needs_times(merging):
                return None, None
            merging = merging(asked.model.workload(), CostModel(AffineTime(), AffineTime()))
        return None, num_names(merging, asked.sparsifier, size)
    try:
        workload = asked.model.workload(profile)
    except HorovodSparseError:
        return None, None
    plan = merging if isinstance(merging, Plan) else merging(workload, profile.cost(asked.sparsifier))
    plan.check(workload.parameters)
    names = num_names(plan, asked.sparsifier, size)
    return forecast(profile, workload, asked.sparsifier, merging), names
