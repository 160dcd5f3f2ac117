"""Making a plan from times, on rank 0 for all; and what was decided, with its reasons."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.collectives import Synchronization
from horovod_sparse.cost import CostModel, LevelChoice, Levels, Profile, assumed_cost, check_same_profile
from horovod_sparse.cost.formulas import faster_levels
from horovod_sparse.errors import ProfileMismatchError
from horovod_sparse.frontend.agreement import shared_lines
from horovod_sparse.frontend.calibration import QUICK, Extent, Where, calibration
from horovod_sparse.frontend.calibration.backward_times import BackwardTimes, mean_times
from horovod_sparse.frontend.calibration.buckets import BucketMemory
from horovod_sparse.frontend.collective_errors import raise_together
from horovod_sparse.frontend.correction import corrected, measured_step
from horovod_sparse.frontend.plan_request import PlanRequest, make_plan, sparsifies_by_formulas
from horovod_sparse.merging import (
    DEFAULT_BUCKET_BYTES,
    Kept,
    ParameterFacts,
    Plan,
    Workload,
    dense_of,
    densest_plan,
    fixed,
    layerwise,
    leave_losing_buckets,
    predict,
    select_tensors,
    single,
)
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.topology import Topology

_log = logging.getLogger("horovod_sparse")


@dataclass(frozen=True)
class Decision:
    """A plan, and why it was taken.

    Attributes:
        plan: which parameters form which bucket, and which stay dense.
        asked: what the optimizer was asked for.
        predicted_seconds: of an iteration under this plan ("taken"), and under others.
        profile: the measurements it stands on, backward times included: `save` it, and the next run can
            begin with the plan.
        density: why the plan has its density, in words; empty where it was not asked for.
    """

    plan: Plan
    asked: str
    predicted_seconds: Mapping[str, float]
    profile: Profile
    density: str = ""

    def __str__(self) -> str:
        taken, *others = (
            f"{name} {1e3 * seconds:.4g} ms" for name, seconds in self.predicted_seconds.items()
        )
        text = f"{self.asked}: {self.plan}; predicted per iteration: {taken}; others: {', '.join(others)}"
        return f"{text}; {self.density}" if self.density else text


def check_agreement(request: PlanRequest | None) -> Synchronization[None]:
    """Refuses ranks that ask for different things: other arguments, other profiles, one that is broken.

    Raises:
        ProfileMismatchError: on every rank alike.
    """
    profile = None if request is None else request.profile
    failure = None if request is None or request.failure is None else str(request.failure)
    mine = {
        "asked": None if request is None else request.describe(),
        "digest": "no profile" if profile is None else profile.digest(),
        "failure": failure,
    }
    everyone = yield from shared_lines(mine)
    for rank, other in enumerate(everyone):
        if other["failure"] is not None:
            raise ProfileMismatchError(f"rank {rank} cannot read its profile: {other['failure']}")
    first = everyone[0]["asked"]
    for rank, other in enumerate(everyone):
        if other["asked"] != first:
            raise ProfileMismatchError(
                f"rank 0 asks for {first}, rank {rank} for {other['asked']}: give all the same arguments"
            )
    check_same_profile([other["digest"] for other in everyone])


def decide(
    request: PlanRequest,
    where: Where,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    times: BackwardTimes | None,
    *,
    memory: BucketMemory | None = None,
    extent: Extent = QUICK,
    dtype: str = "float32",
    starting_seconds: Callable[[], float] = lambda: 0.0,
    current: Plan | None = None,
    current_density: float | None = None,
) -> Synchronization[Decision]:
    """Agrees on what was measured, measures what is missing, plans on rank 0, and tells all ranks.

    A coroutine that all ranks run together, between two steps. Every collective in it is entered by every
    rank: what can go wrong on one rank alone is told to the others, and all raise.

    Args:
        request: by this rank's arguments.
        where: this rank, and what a profile says of the cluster.
        parameters: of the model, the same on all ranks; their order matters on rank 0.
        sparsifier: that the buckets have.
        times: measured on this rank; None where it has none, or the profile has them.
        memory: where buckets are, for measuring.
        extent: of measuring, where no profile was given.
        dtype: of most gradients.
        starting_seconds: how long it took to start the last request; see `calibration`.
        current: the plan under which `times` were measured; predictions are corrected by them then, see
            `corrected`.
        current_density: that buckets had meanwhile, where it was not the sparsifier's own (a schedule's).

    Returns:
        The decision: the same plan on all ranks.

    Raises:
        ProfileMismatchError: on all ranks, if their profiles differ, or cannot be applied here.
        HorovodSparseError: on all ranks, if planning failed on rank 0.
    """
    yield from check_agreement(request)
    limits = request.density
    if request.profile is None:
        # times are fitted at a density and at four times that: the limits shall not be far from either
        timed = sparsifier if limits is None else dataclasses.replace(sparsifier, density=limits.middle)
        profile = yield from calibration(
            where,
            [timed],
            extent=extent,
            memory=memory,
            dtype=dtype,
            starting_seconds=starting_seconds,
            topology=where.topology,
        )
    else:
        profile = request.profile
        profile.check(size=where.size, framework=where.framework)  # refuses what cannot be applied
    if not profile.backward_seconds:
        measured = yield from mean_times(times)
        profile = dataclasses.replace(
            profile,
            backward_seconds=dict(reversed(list(measured.backward_seconds.items()))),
            forward_seconds=measured.forward_seconds,
        )
        if current is not None:
            own = request.profile is None
            # in those iterations as much was sent as was asked for then
            then = next((one for one in (current_density, current.density) if one is not None), None)
            as_sent = sparsifier if then is None else dataclasses.replace(sparsifier, density=then)
            given = current, parameters, as_sent, where.size, own, where.topology
            profile = corrected(profile, measured, *given)
    decision, failure = None, None
    if where.rank == 0:
        try:
            decision = plan_by_times(request, where, parameters, sparsifier, profile)
        except Exception as error:
            failure = error
    yield from raise_together(failure)
    told = None
    if decision is not None:
        told = [decision.plan.to_dict(), dict(decision.predicted_seconds), decision.density]
    everyone = yield from shared_lines(told)
    plan, predicted, density = everyone[0]
    return Decision(Plan.from_dict(plan), request.describe(), predicted, profile, density)


def plan_by_times(
    request: PlanRequest,
    where: Where,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    profile: Profile,
) -> Decision:
    """The plan that a complete profile leads to; needs no collective.

    Args:
        request: what is wanted.
        where: it shall be applied.
        parameters: of the model.
        sparsifier: that the buckets have.
        profile: with backward times.

    Raises:
        ProfileMismatchError: if the profile cannot be applied here: it lacks something, or is of another
            model. What merely makes predictions worse is logged.
    """
    if request.profile is not None:
        for difference in profile.check(
            size=where.size,
            framework=where.framework,
            controller=where.controller,
            cycle_seconds=where.cycle_seconds,
        ):
            _log.warning("%s", difference)

    def step(density: float) -> tuple[Workload, CostModel]:
        chosen = dataclasses.replace(sparsifier, density=density)
        return measured_step(profile, parameters, chosen, where.size, where.topology)

    def plan_at(density: float) -> Plan:
        workload, cost = step(density)
        dense = workload.dense | dense_of(select_tensors(request.selection, workload.parameters, cost))
        return request.strategy(workload.with_dense(dense), cost)

    def seconds(plan: Plan, density: float) -> float:
        workload, cost = step(density)
        return predict(workload, plan, cost).iteration_seconds

    density, reason = sparsifier.density, ""
    if request.density is None:
        plan = plan_at(density)
    else:
        choice = densest_plan(request.density, plan_at, seconds)
        plan, density, reason = choice.plan, choice.density, choice.reason
    workload, cost = step(density)
    plan.check(workload.parameters)
    return Decision(plan, request.describe(), _predicted(workload, plan, cost), profile, reason)


def levels_by_plan(
    request: PlanRequest,
    profile: Profile,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    num_hosts: int,
    per_host: int,
) -> LevelChoice:
    """Which levels ``levels="auto"`` comes to where a profile says all: those of the shorter iteration.

    Args:
        request: what is wanted; each iteration is under the plan that is made for its levels.
        profile: that says all.
        parameters: of the model.
        sparsifier: that the buckets have.
        num_hosts: N.
        per_host: L.
    """
    if per_host == 1:
        return LevelChoice("flat", "every host has one rank")
    flat = Where(0, num_hosts * per_host, profile.framework, profile.controller, profile.cycle_seconds)
    here = {"flat": flat, "host": dataclasses.replace(flat, topology=Topology.regular(num_hosts, per_host))}
    plain = dataclasses.replace(request, profile=None)  # whose differences are told elsewhere

    def seconds(levels: Levels) -> float:
        return plan_by_times(plain, here[levels], parameters, sparsifier, profile).predicted_seconds["taken"]

    return faster_levels(seconds, sparsifier, profile, num_hosts, per_host, "an iteration: ")


@dataclass(frozen=True)
class FirstPlan:
    """What this rank would begin with; all ranks take the first rank's, once they have agreed.

    Attributes:
        plan: which parameters form which bucket.
        request: how plans are made; None where one was given, or none is asked for.
        decision: why the plan was taken, where a profile decided.
        failure: why the plan is not the one that was asked for.
        selection: why buckets are dense though nobody asked for that, in words; empty where none are.
    """

    plan: Plan
    request: PlanRequest | None = None
    decision: Decision | None = None
    failure: Exception | None = None
    selection: str = ""


def first_plan(
    request: PlanRequest | None,
    facts: Mapping[str, tuple[ParameterFacts, Any]],
    sparsifier: Sparsifier,
    where: Callable[[], Where],
    **arguments: Any,
) -> FirstPlan:
    """The plan that needs no measuring: as asked for, by a complete profile's times, or the default one.

    Args:
        request: how plans are made; None where `arguments` say what the plan is.
        facts: of every parameter by name, and the parameter.
        sparsifier: that the buckets have.
        where: tells where the plan shall be applied.
        **arguments: of `make_plan`, without a request.

    Raises:
        ArgumentError: for arguments that exclude each other, or a plan that does not fit them. What may
            fail on one rank alone is kept as the failure.
    """
    parameters = [fact for fact, _ in facts.values()]
    if request is None:
        made = make_plan(facts, **arguments)
        if all(given is None for given in arguments.values()) and sparsifies_by_formulas():
            return _by_formulas(made, parameters, sparsifier, where())
        return FirstPlan(made)
    if isinstance(request.strategy, Kept):  # buckets are given, their density is not
        request = dataclasses.replace(request, strategy=Kept(make_plan(facts, **arguments)))
    try:
        if request.failure is not None:
            raise request.failure
        if request.measures and request.profile is not None and request.complete:
            decision = plan_by_times(request, where(), parameters, sparsifier, request.profile)
            return FirstPlan(decision.plan, request, decision)
        made = request.first_plan(parameters)
        made.check(parameters)
        return FirstPlan(made, request)
    except Exception as failure:  # a rule of the user's may fail on one rank alone
        return FirstPlan(make_plan(facts), request, failure=failure)


def _by_formulas(
    plan: Plan, parameters: Sequence[ParameterFacts], sparsifier: Sparsifier, where: Where
) -> FirstPlan:
    """The plan where nobody has said anything of buckets: without those that cannot win.

    One rank sparsifies as each of many would. So does elastic training, where the number of ranks changes,
    and workers that join meet others that have decided already.
    """
    if where.size == 1 or os.environ.get("HOROVOD_ELASTIC") == "1":
        return FirstPlan(plan)
    on_device = where.device != "cpu"
    cost = assumed_cost(
        sparsifier,
        where.size,
        one_host=where.one_host,
        on_device=on_device,
        on_mpi=where.controller == "mpi",
        cycle_seconds=where.cycle_seconds,
        per_host=1 if where.topology is None else where.topology.per_host,
    )
    kept, choices = leave_losing_buckets(plan, parameters, cost)
    lost = [choice for choice in choices if choice.dense]
    if not lost:
        return FirstPlan(plan)
    sizes = {parameter.name: parameter.num_elements for parameter in parameters}
    number = sum(sizes[name] for name in kept.dense)
    network = "on one host" if where.one_host else "at 1 Gbit/s"
    words = (
        f"{number:,} of {sum(sizes.values()):,} elements stay dense, where {sparsifier.name} cannot win "
        f"by formulas: {where.size} ranks {network}, {lost[0].reason} for the first of {len(lost)} bucket"
        f"{'s' if len(lost) > 1 else ''} (selection, dense, sparse)"
    )
    if where.rank == 0:
        _log.warning("%s. tensor_selection='all' sparsifies all the same", words)
    return FirstPlan(kept, selection=words)


def _predicted(workload: Workload, plan: Plan, cost: CostModel) -> dict[str, float]:
    default = fixed(bytes=DEFAULT_BUCKET_BYTES)
    others = {
        "layerwise": layerwise(workload, cost),
        "single": single(workload, cost),
        "fixed 8192": fixed(num_elements=8192)(workload, cost),
        "default": default(workload, cost),
        "all dense": Plan((), tuple(parameter.name for parameter in workload.backward)),
    }
    plans = {"taken": plan, **others}
    return {name: predict(workload, item, cost).iteration_seconds for name, item in plans.items()}
