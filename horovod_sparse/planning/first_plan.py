"""The plan that a training begins with, and what ranks compare of how they asked for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from horovod_sparse.plans.dense import TENSOR_SELECTION_VARIABLE, ClusterFacts, without_small_buckets
from horovod_sparse.plans.plan import ParameterFacts, Plan, make_plan
from horovod_sparse.sparsifiers import Sparsifier

if TYPE_CHECKING:
    from horovod_sparse.planning.request import Decision, PlanRequest

_log = logging.getLogger("horovod_sparse")


@dataclass(frozen=True)
class FirstPlan:
    """The plan that this rank begins with, until all ranks agree on that of rank 0."""

    plan: Plan
    #: how plans are made; None if one was given, or nothing was asked for
    request: PlanRequest | None = None
    #: why the plan was taken, if a profile decided
    decision: Decision | None = None
    #: why the plan is not the one that was asked for
    failure: Exception | None = None
    #: a sentence about buckets that stay dense for their size; empty if none do
    selection: str = ""


def first_plan(
    request: PlanRequest | None,
    facts: Mapping[str, tuple[ParameterFacts, Any]],
    sparsifier: Sparsifier,
    cluster: Callable[[], ClusterFacts],
    **arguments: Any,
) -> FirstPlan:
    """Returns the plan asked for, or the default one; an error of one rank alone is kept, and told later."""
    parameters = [fact for fact, _ in facts.values()]
    if request is None:
        made = make_plan(facts, **arguments)
        if any(given is not None for given in arguments.values()):
            return FirstPlan(made)
        kept, words = without_small_buckets(made, parameters)
        if words and cluster().rank == 0:
            remedy = f"tensor_selection='all' sparsifies them, and so does {TENSOR_SELECTION_VARIABLE}=all"
            _log.warning("%s. %s", words, remedy)
        return FirstPlan(kept, selection=words)
    try:
        if request.failure is not None:
            raise request.failure
        if request.measures and request.profile is not None and request.complete:
            from horovod_sparse.planning.request import plan_by_times  # most trainings need none

            decision = plan_by_times(request, cluster(), parameters, sparsifier, request.profile)
            return FirstPlan(decision.plan, request, decision)
        made = request.first_plan(parameters)
        made.check(parameters)
        return FirstPlan(made, request)
    except Exception as failure:  # a rule of the user's may fail on one rank alone
        return FirstPlan(make_plan(facts), request, failure=failure)


def asked_of(request: PlanRequest | None) -> dict[str, str]:
    """What has to be equal on all ranks of how plans are made, in words."""
    if request is None:
        return {"plan": "the default"}
    profile = request.digest if request.failure is None else f"one that cannot be read ({request.failure})"
    return {"plan": request.describe(), "profile": profile}
