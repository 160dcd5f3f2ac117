"""The arguments that decide about buckets, checked against each other."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_sparse.errors import ArgumentError, HorovodSparseError, ProfileMismatchError, UnknownNameError
from horovod_sparse.feedback import AutoDensity, Recipe
from horovod_sparse.planning.calibration.steps import measured_step
from horovod_sparse.planning.cost_model import AffineTime, CostModel
from horovod_sparse.planning.optimal import optimal
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.selection import (
    TensorSelection,
    dense_of,
    densest_plan,
    select_tensors,
)
from horovod_sparse.planning.strategies import Fixed, Kept, Strategy, fixed, layerwise, omgs, single
from horovod_sparse.planning.timeline import Timeline, predict
from horovod_sparse.planning.workload import Workload, whole_parameters
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.plans.plan import DEFAULT_BUCKET_BYTES, ParameterFacts, Plan, only_one
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.sparsifiers.base import value_text

_log = logging.getLogger("horovod_sparse")

#: what stands in for times where none are looked at
_NO_COST = CostModel(AffineTime(), AffineTime())


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
        measured: the network's share of an iteration, in the last steps that were looked at.
        remedy: what keeps to the network's share where no plan does; empty where this one does.
    """

    plan: Plan
    asked: str
    predicted_seconds: Mapping[str, float]
    profile: Profile
    density: str = ""
    measured: float = math.nan
    remedy: str = ""

    def __str__(self) -> str:
        taken, *others = (
            f"{name} {1e3 * seconds:.4g} ms" for name, seconds in self.predicted_seconds.items()
        )
        text = f"{self.asked}: {self.plan}; predicted per iteration: {taken}; others: {', '.join(others)}"
        return f"{self.density}\n{text}" if self.density else text


#: What `merging=` takes by name; `fixed(...)` takes an argument and so is given itself.
STRATEGIES: dict[str, Strategy] = {
    "layerwise": layerwise,
    "single": single,
    "omgs": omgs,
    "optimal": optimal,
}


def strategy_named(merging: Any) -> Strategy:
    """The strategy that the argument `merging` means.

    Args:
        merging: a name, `fixed(...)`, or any function of a workload and a cost model.

    Raises:
        UnknownNameError: for a misspelt name, with the valid ones.
        ArgumentError: if it is something else.

    Example:
        >>> strategy_named("omgs").__name__
        'omgs'
    """
    if isinstance(merging, str):
        if merging not in STRATEGIES:
            raise UnknownNameError("merging", merging, [*STRATEGIES, "fixed(num_elements=...)"])
        return STRATEGIES[merging]
    if not callable(merging):
        raise ArgumentError("merging", merging, f"one of {sorted(STRATEGIES)}, fixed(...) or a function")
    strategy: Strategy = merging
    return strategy


def needs_times(strategy: Strategy) -> bool:
    """Whether a strategy looks at backward times and costs, so that something has to be measured first.

    Example:
        >>> needs_times(optimal), needs_times(single)
        (True, False)
    """
    return not (isinstance(strategy, (Fixed, Kept)) or strategy in (layerwise, single))


@dataclass(frozen=True)
class NetworkShare:
    """How much of an iteration the network may take, and of which recipe the accuracy is told."""

    limit: float
    recipe: Recipe


@dataclass(frozen=True)
class PlanRequest:
    """A way to make plans, as the arguments of an optimizer ask for it.

    `merging` is as the user wrote it, `failure` why his profile could not be read: raised once all ranks have
    been told. Within the limits of `density`, if there are any, times decide about that, too.
    """

    merging: str
    strategy: Strategy
    selection: TensorSelection = "all"
    profile: Profile | None = None
    failure: HorovodSparseError | None = None
    density: AutoDensity | None = None
    share: NetworkShare | None = None

    @property
    def measures(self) -> bool:
        """Whether the plan depends on times, or the density does."""
        return self._merges_by_times or self.density is not None or self.share is not None

    @property
    def _merges_by_times(self) -> bool:
        return needs_times(self.strategy) or self.selection == "cost"

    @property
    def complete(self) -> bool:
        """Whether a profile says all that there is to measure."""
        return self.profile is not None and bool(self.profile.backward_seconds)

    @property
    def digest(self) -> str:
        return "no profile" if self.profile is None else self.profile.digest()

    def keeping(self, make: Callable[[], Plan]) -> PlanRequest:
        """With the plan that is made, where buckets are given and their density is not."""
        return dataclasses.replace(self, strategy=Kept(make())) if isinstance(self.strategy, Kept) else self

    def decided(
        self, cluster: ClusterFacts, parameters: Sequence[ParameterFacts], sparsifier: Sparsifier
    ) -> Decision:
        """By a complete profile; see `plan_by_times`."""
        if self.profile is None:
            raise ArgumentError("profile", None, "one that has all times")
        return plan_by_times(self, cluster, parameters, sparsifier, self.profile)

    def describe(self) -> str:
        """One line, equal on ranks that ask for the same."""
        text = f"merging={self.merging}, tensor_selection={_name_of(self.selection)}"
        text += "" if self.density is None else f", density={value_text(self.density)}"
        return text if self.share is None else f"{text}, {self.share_words}"

    @property
    def share_words(self) -> str:
        """The network's share, as it was given; empty without."""
        return "" if self.share is None else f"network_share={self.share.limit:g}"

    def first_plan(self, parameters: Sequence[ParameterFacts]) -> Plan:
        """The plan that needs no times: the one asked for, or the default one until times are known."""
        if self.share is not None:  # dense, until it is known what the network takes
            return Plan((), tuple(parameter.name for parameter in reversed(parameters)))
        dense = whole_parameters(parameters)
        if self.selection != "cost":
            dense |= dense_of(select_tensors(self.selection, parameters))
        workload = Workload(tuple(parameters), (1.0,) * len(parameters), dense=dense)
        strategy = fixed(bytes=DEFAULT_BUCKET_BYTES) if self._merges_by_times else self.strategy
        return strategy(workload, _NO_COST)


def requested(
    merging: Any,
    tensor_selection: Any,
    profile: Any,
    plan: Plan | None,
    groups: Any,
    bucket_bytes: int | None,
    density: AutoDensity | None,
    share: NetworkShare | None = None,
) -> tuple[PlanRequest | None, Plan | None]:
    """What the arguments ask for, if they do not contradict each other.

    ==================  =========================================================================
    `plan`, `groups`    say which parameters form which bucket: nothing else may be said
    a `Plan` as         the same as `plan`
    `merging`
    `bucket_bytes`      the same as ``merging=fixed(bytes=...)``; `tensor_selection` may be given
    `profile`           is looked at where times are; otherwise it changes nothing
    `density`           is decided by times, whatever buckets there are; a `Plan` that says one decides it
    ==================  =========================================================================

    Example:
        >>> from horovod_sparse.planning import plan_request
        >>> plan_request(merging="optimal", tensor_selection="cost")[0].measures
        True
        >>> plan_request(merging="optimal", bucket_bytes=1000)
        Traceback (most recent call last):
        horovod_sparse.errors.ArgumentError: merging and bucket_bytes=('optimal', 1000) is not allowed: ...
    """
    if isinstance(merging, Plan):
        only_one(merging=merging, plan=plan)
        merging, plan = None, merging
    only_one(merging=merging, plan=plan, groups=groups, bucket_bytes=bucket_bytes)
    only_one(tensor_selection=tensor_selection, plan=plan)
    only_one(tensor_selection=tensor_selection, groups=groups)
    if share is not None and plan is not None and plan.density is not None:
        raise ArgumentError("network_share", share.limit, "none beside a plan that says its density")
    decides = density is not None or share is not None
    if decides and (groups is not None or (plan is not None and plan.density is None)):
        name = "the plan given" if groups is None else "groups"
        return PlanRequest(name, Kept(plan), "all", *_profile(profile), density, share), plan
    if plan is not None or (merging is None and tensor_selection is None and not decides):
        if profile is not None:
            what = "merging='optimal' or 'omgs', or tensor_selection='cost' with it"
            raise ArgumentError("profile", profile, what)
        return None, plan
    strategy: Strategy
    if merging is None:
        strategy = fixed(bytes=DEFAULT_BUCKET_BYTES if bucket_bytes is None else bucket_bytes)
    else:
        strategy = strategy_named(merging)
    selection = "all" if tensor_selection is None else tensor_selection
    select_tensors(selection, (), _NO_COST)  # refuses what is no rule
    name = _name_of(strategy if merging is None else merging)
    return PlanRequest(name, strategy, selection, *_profile(profile), density, share), None


def _name_of(rule: Any) -> str:
    """What a rule is called; the same on all ranks, so without addresses."""
    if isinstance(rule, str):
        return rule
    if dataclasses.is_dataclass(rule):
        return repr(rule)
    return str(getattr(rule, "__name__", type(rule).__name__))


def _profile(given: Any) -> tuple[Profile | None, HorovodSparseError | None]:
    if given is None or isinstance(given, Profile):
        return given, None
    if not isinstance(given, (str, Path)):
        raise ArgumentError("profile", given, "a Profile, or the path of a saved one")
    try:
        return Profile.load(given), None
    except ProfileMismatchError as error:
        return None, error
    except OSError as error:
        return None, ProfileMismatchError(f"{given}: the profile cannot be read ({error.strerror})")


def plan_by_times(
    request: PlanRequest,
    where: ClusterFacts,
    parameters: Sequence[ParameterFacts],
    sparsifier: Sparsifier,
    profile: Profile,
) -> Decision:
    """The plan that a complete profile leads to; needs no collective."""
    if request.profile is not None:
        for difference in profile.check(
            size=where.size,
            framework=where.framework,
            controller=where.controller,
            cycle_seconds=where.cycle_seconds,
        ):
            _log.warning("%s", difference)

    def step(density: float, values: str | None = None) -> tuple[Workload, CostModel]:
        chosen = sparsifier.sent_as(density, values)
        return measured_step(profile, parameters, chosen, where.size, where.topology)

    def plan_at(density: float, values: str | None = None) -> Plan:
        workload, cost = step(density, values)
        dense = workload.dense | dense_of(select_tensors(request.selection, workload.parameters, cost))
        return dataclasses.replace(request.strategy(workload.with_dense(dense), cost), values=values)

    def step_of(plan: Plan, density: float) -> Timeline:
        workload, cost = step(density, plan.values if plan.buckets else None)
        return predict(workload, plan, cost)

    density, reason = sparsifier.density, ""
    if request.share is not None:
        return _by_share(request, request.share, step, plan_at, step_of, sparsifier, profile)
    if request.density is None:
        plan = plan_at(density)
    else:
        choice = densest_plan(request.density, plan_at, lambda *at: step_of(*at).iteration_seconds)
        plan, density, reason = choice.plan, choice.density, choice.reason
    workload, cost = step(density)
    plan.check(workload.parameters)
    return Decision(plan, request.describe(), _predicted(workload, plan, cost), profile, reason)


def _by_share(
    request: PlanRequest,
    share: NetworkShare,
    step: Callable[..., tuple[Workload, CostModel]],
    plan_at: Callable[..., Plan],
    step_of: Callable[[Plan, float], Timeline],
    sparsifier: Sparsifier,
    profile: Profile,
) -> Decision:
    """What fits into the network's share, in three lines: what was chosen, its times, its accuracy."""
    from horovod_sparse.planning.advice import accuracy, by_share

    recipe, (workload, _) = share.recipe, step(sparsifier.density)
    chosen, remedy = by_share(share.limit, recipe, profile, workload, plan_at, step_of)
    plan, values = chosen.plan, chosen.plan.values
    if not sparsifier.follows_density:
        plan = dataclasses.replace(plan, density=None)
    known = "that of dense training" + (", gradients rounded to float16" if values else "")
    if plan.buckets:
        known = accuracy(recipe.at(plan.density, values), None)
    told = f"{request.share_words}: {chosen.words}\n{chosen.times}\naccuracy: {known}"
    workload, cost = step(chosen.density, values) if plan.buckets else step(sparsifier.density)
    plan.check(workload.parameters)
    made = predict(workload, plan, cost)
    alone = made.iteration_seconds - made.visible_seconds
    predicted = {**_predicted(workload, plan, cost), "without network": alone}
    return Decision(plan, request.describe(), predicted, profile, told, remedy=remedy)


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
