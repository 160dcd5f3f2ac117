"""Plans by times: measuring a cluster, what a step costs, and the best buckets.

The modules here are loaded with `merging`, `tensor_selection` or `profile`: most trainings need none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horovod_sparse.plans.plan import Plan, only_one

if TYPE_CHECKING:
    from horovod_sparse.planning.request import PlanRequest


def plan_request(
    *,
    merging: Any = None,
    tensor_selection: Any = None,
    profile: Any = None,
    plan: Plan | None = None,
    groups: Any = None,
    bucket_bytes: int | None = None,
) -> tuple[PlanRequest | None, Plan | None]:
    """Returns what the arguments ask for, and the plan if one is given: see `planning.request.requested`."""
    if merging is None and tensor_selection is None and profile is None:
        only_one(plan=plan, groups=groups, bucket_bytes=bucket_bytes)
        return None, plan
    from horovod_sparse.planning.request import requested

    return requested(merging, tensor_selection, profile, plan, groups, bucket_bytes)
