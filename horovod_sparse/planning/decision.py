"""Making a plan from times, on rank 0 for all; and what was decided, with its reasons."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from horovod_sparse.collectives import Synchronization, shared_lines
from horovod_sparse.errors import ProfileMismatchError
from horovod_sparse.planning.calibration import QUICK, Extent, calibration
from horovod_sparse.planning.calibration.backward_times import BackwardTimes, mean_times
from horovod_sparse.planning.calibration.buckets import BucketMemory
from horovod_sparse.planning.correction import corrected
from horovod_sparse.planning.formulas import LevelChoice, choose_levels, faster_levels
from horovod_sparse.planning.profile import Levels, Profile
from horovod_sparse.planning.request import Decision, PlanRequest, plan_by_times
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.plans.plan import ParameterFacts, Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.topology import Topology
from horovod_sparse.training.collective_errors import raise_together
from horovod_sparse.training.first_plan import check_agreement

_log = logging.getLogger("horovod_sparse")


def decide(
    request: PlanRequest,
    where: ClusterFacts,
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


def levels_by_plan(
    request: PlanRequest,
    profile: Profile,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    num_hosts: int,
    per_host: int,
) -> LevelChoice:
    """Which levels ``levels="auto"`` comes to where a profile says all: those of the shorter iteration."""
    if per_host == 1:
        return LevelChoice("flat", "every host has one rank")
    flat = ClusterFacts(0, num_hosts * per_host, profile.framework, profile.controller, profile.cycle_seconds)
    here = {"flat": flat, "host": dataclasses.replace(flat, topology=Topology.regular(num_hosts, per_host))}
    plain = dataclasses.replace(request, profile=None)  # whose differences are told elsewhere

    def seconds(levels: Levels) -> float:
        return plan_by_times(plain, here[levels], parameters, sparsifier, profile).predicted_seconds["taken"]

    return faster_levels(seconds, sparsifier, profile, num_hosts, per_host, "an iteration: ")


def levels_by_cost(
    request: PlanRequest | None,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    num_hosts: int,
    per_host: int,
) -> LevelChoice:
    """By the profile that was given, or by formulas; of iterations under plans where these go by it."""
    profile, n = None if request is None else request.profile, sum(one.num_elements for one in parameters)
    try:
        if request is not None and profile is not None and request.measures and request.complete:
            return levels_by_plan(request, profile, parameters, sparsifier, num_hosts, per_host)
        return choose_levels(sparsifier, max(1, n), num_hosts, per_host, profile=profile)
    except ProfileMismatchError as error:
        return LevelChoice("flat", f"the profile cannot tell ({error})")
