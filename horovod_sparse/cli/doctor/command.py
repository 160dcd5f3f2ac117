"""`horovod-sparse doctor`: looks at an installation, its settings, and a launch."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console

from horovod_sparse.cli.console import console as make_console
from horovod_sparse.cli.console import show
from horovod_sparse.cli.doctor.checks import Case, Finding, examine
from horovod_sparse.cli.doctor.facts import build_facts, cycle_of, framework_facts, local_facts, rank_facts
from horovod_sparse.cli.model import FORMAT, Model, read_model
from horovod_sparse.cli.options import density, read_merging, read_recipe
from horovod_sparse.cli.plan.accuracy import OPTIMIZERS
from horovod_sparse.cli.plan.verdict import verdict_of
from horovod_sparse.cli.ranks import FRAMEWORKS, Ranks, start, usable_framework
from horovod_sparse.errors import HorovodMissingError, HorovodSparseError, ProfileMismatchError
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning.calibration import QUICK, calibration, needed_kinds
from horovod_sparse.planning.cost_model import AffineTime, CostModel
from horovod_sparse.planning.formulas import profile_at
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.request import needs_times
from horovod_sparse.planning.strategies import Strategy
from horovod_sparse.planning.timeline import predict
from horovod_sparse.planning.workload import LAYER_TABLES
from horovod_sparse.plans.plan import Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.training.settings import LEVELS

#: cycle times that are tried, in milliseconds
_CYCLES = (0.5, 0.2, 0.1)


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
    add("--optimizer", choices=OPTIMIZERS, help="of the training: for what it costs in accuracy")
    text = "of horovod-sparse calibrate; without it a few seconds are measured under a launch"
    add("--profile", metavar="FILE", help=text)


def run(options: argparse.Namespace) -> int:
    """Looks and prints; under a launch rank 0 prints."""
    recipe, merging = read_recipe(options.sparsifier, options.density), read_merging(options.merging)
    recipe.refuse_auto("doctor")
    model = None if options.model is None else read_model(options.model)
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
    try:
        case = Case(everyone, options.framework, recipe, options.optimizer, options.levels)
        case = _with_predictions(case, recipe, merging, model, _profile(options.profile, ranks), ranks)
        findings = examine(case)
    finally:
        if ranks is not None:
            ranks.end()
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


def _profile(path: str | None, ranks: Ranks | None) -> Profile | None:
    if path is None or ranks is None:
        return None if path is None else Profile.load(path)
    loaded: Profile = ranks.agreed(lambda: Profile.load(path))
    return loaded


def _with_predictions(
    case: Case,
    recipe: Recipe,
    merging: Strategy | Plan,
    model: Model | None,
    profile: Profile | None,
    ranks: Ranks | None,
) -> Case:
    """With what a profile and a model say besides: the same on every rank, by the facts of all."""
    facts, sparsifier = case.facts, recipe.sparsifier
    size = max(2, facts["size"])
    case = dataclasses.replace(case, num_rounds=len(sparsifier.rounds(size)))
    if profile is not None:
        try:
            profile, differs = _usable(profile, facts, sparsifier)
            case = dataclasses.replace(case, profile_differs=differs)
        except ProfileMismatchError as error:
            profile, case = None, dataclasses.replace(case, profile_refused=str(error))
    elif model is not None and ranks is not None and ranks.size > 1 and all(map(_has_cycle, case.everyone)):
        kinds, extent = needed_kinds([sparsifier], ranks.size), dataclasses.replace(QUICK, repetitions=5)
        measuring = calibration(ranks.where(), [sparsifier], extent=extent, kinds=kinds)
        profile = ranks.carry_out(measuring, name="doctor")
    if model is None:
        return case
    if profile is None:
        if isinstance(merging, Plan) or not needs_times(merging):
            free = CostModel(AffineTime(), AffineTime())
            plan = merging if isinstance(merging, Plan) else merging(model.workload(), free)
            case = dataclasses.replace(case, num_names=num_names(plan, sparsifier, size))
        return case
    try:
        workload = model.workload(profile)
    except HorovodSparseError:
        return case
    known: Profile = profile

    def plan_by(cost: CostModel) -> Plan:
        return merging if isinstance(merging, Plan) else merging(workload, cost)

    def iteration(cycle_ms: float) -> float:
        cost = profile_at_cycle(known, cycle_ms * 1e-3).cost(sparsifier, fuse_sparse=True)
        plan = plan_by(cost)
        return predict(workload.with_dense(plan.dense), plan, cost).iteration_seconds

    plan = plan_by(profile.cost(sparsifier))
    plan.check(workload.parameters)
    now = cycle_of(facts["settings"])
    cycles = [now, *(cycle for cycle in _CYCLES if cycle < now)] if now else []
    return dataclasses.replace(
        case,
        num_names=num_names(plan, sparsifier, size),
        iterations={cycle: iteration(cycle) for cycle in cycles},
        verdict=verdict_of(workload, profile, [recipe]) if profile.size > 1 else None,
        num_elements=sum(parameter.num_elements for parameter in workload.parameters),
    )


def _has_cycle(facts: Mapping[str, Any]) -> bool:
    return cycle_of(facts["settings"]) is not None


def _usable(profile: Profile, facts: Mapping[str, Any], sparsifier: Sparsifier) -> tuple[Profile, list[str]]:
    """The profile for this number of ranks, and what differs from here."""
    size, cycle = facts["size"] if facts["size"] > 1 else profile.size, cycle_of(facts["settings"])
    differences = profile.check(
        size=size,
        framework=facts["framework"],
        controller=facts["controller"],
        cycle_seconds=None if cycle is None else cycle * 1e-3,
    )
    usable = profile_at(profile, size)
    usable.cost(sparsifier)  # refuses what was not measured
    return usable, differences


def num_names(plan: Plan, sparsifier: Sparsifier, size: int) -> int:
    """Names of collectives in a step: one for every round of a bucket, one for what is dense."""
    return len(plan.buckets) * len(sparsifier.rounds(size)) + len(plan.dense)


def profile_at_cycle(profile: Profile, cycle_seconds: float) -> Profile:
    """What a profile would be at another cycle time.

    ``alpha' = alpha - (cycle - cycle') / 2``: a message that is ready anywhere in a cycle waits for half
    of it in the mean (measured with 2 ranks: 0.31, 1.26, 2.26 ms at cycles of 0.1, 1 and 4). What takes
    less than a quarter of a cycle does not wait for one, as messages between two ranks through MPI.
    """
    saved = (profile.cycle_seconds - cycle_seconds) / 2
    collectives = {}
    for kind, fit in profile.collectives.items():
        fixed = fit.fixed_seconds
        if fixed >= profile.cycle_seconds / 4:
            fixed = max(fixed - saved, min(fixed, cycle_seconds / 2))
        collectives[kind] = dataclasses.replace(fit, fixed_seconds=fixed)
    return dataclasses.replace(profile, cycle_seconds=cycle_seconds, collectives=collectives)
