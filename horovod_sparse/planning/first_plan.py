"""The plan that a training begins with, and what ranks compare of how they asked for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from horovod_sparse.collectives import Synchronization, shared_lines
from horovod_sparse.errors import ProfileMismatchError
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


def check_agreement(request: PlanRequest | None) -> Synchronization[None]:
    """Refuses ranks that ask for different things: other arguments, other profiles, one that is broken."""
    mine: dict[str, str | None] = {"asked": None, "digest": "no profile", "failure": None}
    if request is not None:
        failure = None if request.failure is None else str(request.failure)
        mine = {"asked": request.describe(), "digest": request.digest, "failure": failure}
    everyone = yield from shared_lines(mine)
    for rank, other in enumerate(everyone):
        if other["failure"] is not None:
            raise ProfileMismatchError(f"rank {rank} cannot read its profile: {other['failure']}")
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other["asked"] != first["asked"]:
            raise ProfileMismatchError(
                f"rank 0 asks for {first['asked']}, rank {rank} for {other['asked']}: "
                "give all the same arguments"
            )
    check_same_profile([other["digest"] for other in everyone])


def check_same_profile(digests: Sequence[str]) -> None:
    """Refuses ranks that loaded different profiles: they would make different plans.

    Example:
        >>> check_same_profile(["a", "a", "b"])
        Traceback (most recent call last):
        horovod_sparse.errors.ProfileMismatchError: ranks 2 loaded another profile than rank 0 (b, not a)...
    """
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        few = ", ".join(map(str, others[:5])) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        raise ProfileMismatchError(
            f"ranks {few} loaded another profile than rank 0 "
            f"({digests[others[0]]}, not {digests[0]}): give all ranks the same file"
        )
