"""Plans by measured times: calibration, profiles, the model of a step. Loaded on demand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from horovod_sparse import plans
from horovod_sparse.errors import ArgumentError
from horovod_sparse.plans import ParameterFacts, Plan, make_plan, only_one
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.topology import ClusterFacts

if TYPE_CHECKING:
    from horovod_sparse.planning.request import Decision, PlanRequest

_log = logging.getLogger("horovod_sparse")


def plan_request(
    *,
    merging: Any = None,
    tensor_selection: Any = None,
    profile: Any = None,
    plan: Plan | None = None,
    groups: Any = None,
    bucket_bytes: int | None = None,
) -> tuple[PlanRequest | None, Plan | None]:
    """Returns the `PlanRequest` of an optimizer's arguments, or the given plan; raises if these contradict.

    `bucket_bytes` means ``merging=fixed(bytes=...)``, and a `Plan` as `merging` means `plan`.
    """
    if isinstance(merging, Plan):
        only_one(merging=merging, plan=plan)
        merging, plan = None, merging
    only_one(merging=merging, plan=plan, groups=groups, bucket_bytes=bucket_bytes)
    only_one(tensor_selection=tensor_selection, plan=plan)
    only_one(tensor_selection=tensor_selection, groups=groups)
    if merging is None and tensor_selection is None:
        if profile is not None:
            what = "merging='optimal' or 'omgs', or tensor_selection='cost', beside it"
            raise ArgumentError("profile", profile, what)
        return None, plan
    from horovod_sparse.planning.request import PlanRequest

    return PlanRequest.of(merging, tensor_selection, profile, bucket_bytes), None


@dataclass(frozen=True)
class FirstPlan:
    """This rank's first plan, or the error in making it; ranks then agree on rank 0's plan."""

    plan: Plan
    #: None if a plan was given, or nothing was asked for
    request: PlanRequest | None = None
    #: why the plan was taken, if a profile decided
    decision: Decision | None = None
    #: why the plan is not the one that was asked for, on this rank
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
    """Returns the requested (or default) plan; keeps an error in `failure`, for all ranks to raise."""
    parameters = [fact for fact, _ in facts.values()]
    if request is None:
        made = make_plan(facts, **arguments)
        if any(given is not None for given in arguments.values()):
            return FirstPlan(made)
        kept, words = plans.without_small_buckets(made, parameters)
        if words and cluster().rank == 0:
            remedy = "tensor_selection='all' sparsifies them, and so does"
            _log.warning("%s. %s %s=all", words, remedy, plans.TENSOR_SELECTION_VARIABLE)
        return FirstPlan(kept, selection=words)
    try:
        if request.failure is not None:
            raise request.failure
        if request.needs_times:
            decision = request.decide(cluster(), parameters, sparsifier)
            return FirstPlan(decision.plan, request, decision)
        made = request.plan_without_times(parameters)
        made.check(parameters)
        return FirstPlan(made, request)
    except Exception as failure:  # a rule of the user's may fail on one rank alone
        return FirstPlan(make_plan(facts), request, failure=failure)


def described_request(request: PlanRequest | None) -> dict[str, str]:
    """Returns a description of how plans are made, which ranks compare."""
    return {"plan": "the default"} if request is None else request.describe()
