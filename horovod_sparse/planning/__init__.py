"""Plans by times: measuring a cluster, what a step costs, and the best buckets.

Only this file is loaded before somebody asks for one: the rest with `merging`, `tensor_selection`, `profile`,
``density="auto"``, or where ``levels="auto"`` has several hosts to choose for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from horovod_sparse.feedback import BestFeedback, Recipe
from horovod_sparse.plans.plan import ParameterFacts, Plan, only_one
from horovod_sparse.sparsifiers import Sparsifier

if TYPE_CHECKING:
    from horovod_sparse.planning.formulas import LevelChoice
    from horovod_sparse.planning.request import PlanRequest


def plan_request(
    *,
    merging: Any = None,
    tensor_selection: Any = None,
    profile: Any = None,
    plan: Plan | None = None,
    groups: Any = None,
    bucket_bytes: int | None = None,
    density: Any = None,
    network_share: Any = None,
    recipe: Recipe | None = None,
    has_momentum: bool = False,
) -> tuple[PlanRequest | None, Plan | None]:
    """What the arguments ask for, and the plan where one is given as such: see `planning.request`.

    `has_momentum`: the recipe's residual has taken the momentum of SGD over, as "best" lets it.
    """
    if all(one is None for one in (merging, tensor_selection, profile, density, network_share)):
        only_one(plan=plan, groups=groups, bucket_bytes=bucket_bytes)
        return None, plan
    from horovod_sparse.planning.request import NetworkShare, requested

    if recipe is not None and has_momentum:
        recipe = dataclasses.replace(recipe, feedback=BestFeedback())
    share = None if network_share is None or recipe is None else NetworkShare(network_share, recipe)
    return requested(merging, tensor_selection, profile, plan, groups, bucket_bytes, density, share)


def by_cost(
    sparsifier: Sparsifier, parameters: Iterable[ParameterFacts], request: Any
) -> Callable[[int, int], LevelChoice]:
    """What ``levels="auto"`` chooses by: see `planning.warmup.levels_by_cost`."""
    parameters = list(parameters)

    def choose(num_hosts: int, per_host: int) -> LevelChoice:
        from horovod_sparse.planning.warmup import levels_by_cost

        return levels_by_cost(request, parameters, sparsifier, num_hosts, per_host)

    return choose
