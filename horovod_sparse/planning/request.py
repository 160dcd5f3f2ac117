"""The arguments that decide about buckets, checked against each other."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_sparse.errors import ArgumentError, HorovodSparseError, ProfileMismatchError, UnknownNameError
from horovod_sparse.planning.calibration.steps import measured_step
from horovod_sparse.planning.cost_model import AffineTime, CostModel
from horovod_sparse.planning.optimal import optimal
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.selection import TensorSelection, select_tensors
from horovod_sparse.planning.strategies import Fixed, Strategy, fixed, layerwise, omgs, single
from horovod_sparse.planning.timeline import predict
from horovod_sparse.planning.workload import Workload, whole_parameters
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.plans.plan import DEFAULT_BUCKET_BYTES, ParameterFacts, Plan, only_one
from horovod_sparse.sparsifiers import Sparsifier

_log = logging.getLogger("horovod_sparse")

#: stands in for times that a strategy does not read
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
    """

    plan: Plan
    asked: str
    predicted_seconds: Mapping[str, float]
    profile: Profile

    def __str__(self) -> str:
        taken, *others = (
            f"{name} {1e3 * seconds:.4g} ms" for name, seconds in self.predicted_seconds.items()
        )
        return f"{self.asked}: {self.plan}; predicted per iteration: {taken}; others: {', '.join(others)}"


#: What `merging=` takes by name; `fixed(...)` takes an argument and so is given itself.
STRATEGIES: dict[str, Strategy] = {
    "layerwise": layerwise,
    "single": single,
    "omgs": omgs,
    "optimal": optimal,
}


def strategy_named(merging: Any) -> Strategy:
    """Returns the strategy for the argument `merging`.

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
    """True if a strategy reads backward times and costs, which have to be measured first.

    Example:
        >>> needs_times(optimal), needs_times(single)
        (True, False)
    """
    return not (isinstance(strategy, Fixed) or strategy in (layerwise, single))


@dataclass(frozen=True)
class PlanRequest:
    """A way to make plans, as the arguments of an optimizer ask for it.

    `merging` is as the user wrote it. `failure` is why the profile could not be read: it is raised once all
    ranks know of it.
    """

    merging: str
    strategy: Strategy
    selection: TensorSelection = "all"
    profile: Profile | None = None
    failure: HorovodSparseError | None = None

    @property
    def measures(self) -> bool:
        """True if the plan depends on times."""
        return needs_times(self.strategy) or self.selection == "cost"

    @property
    def complete(self) -> bool:
        """True if a profile holds backward times, so that nothing has to be measured."""
        return self.profile is not None and bool(self.profile.backward_seconds)

    @property
    def digest(self) -> str:
        return "no profile" if self.profile is None else self.profile.digest()

    def describe(self) -> str:
        """Returns one line, which ranks compare."""
        return f"merging={self.merging}, tensor_selection={_name_of(self.selection)}"

    def first_plan(self, parameters: Sequence[ParameterFacts]) -> Plan:
        """Returns the plan until times are known: the one asked for if it reads none, else the default."""
        dense = whole_parameters(parameters)
        if self.selection != "cost":
            dense |= select_tensors(self.selection, parameters)
        workload = Workload(tuple(parameters), (1.0,) * len(parameters), dense=dense)
        strategy = fixed(bytes=DEFAULT_BUCKET_BYTES) if self.measures else self.strategy
        return strategy(workload, _NO_COST)


def requested(
    merging: Any,
    tensor_selection: Any,
    profile: Any,
    plan: Plan | None,
    groups: Any,
    bucket_bytes: int | None,
) -> tuple[PlanRequest | None, Plan | None]:
    """Returns the request and the given plan, or refuses arguments that contradict each other.

    ==================  =========================================================================
    `plan`, `groups`    say which parameters form which bucket: nothing else may be said
    a `Plan` as         the same as `plan`
    `merging`
    `bucket_bytes`      the same as ``merging=fixed(bytes=...)``; `tensor_selection` may be given
    `profile`           is looked at where times are; otherwise it changes nothing
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
    if plan is not None or (merging is None and tensor_selection is None):
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
    return PlanRequest(name, strategy, selection, *_profile(profile)), None


def _name_of(rule: Any) -> str:
    """Returns a rule's name without memory addresses, so that ranks can compare it."""
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
    """Makes the plan by a complete profile, without a collective."""
    if request.profile is not None:
        for difference in profile.check(
            size=where.size,
            framework=where.framework,
            controller=where.controller,
            cycle_seconds=where.cycle_seconds,
        ):
            _log.warning("%s", difference)

    workload, cost = measured_step(profile, parameters, sparsifier, where.size, where.topology)
    dense = workload.dense | select_tensors(request.selection, workload.parameters, cost)
    plan = request.strategy(workload.with_dense(dense), cost)
    plan.check(workload.parameters)
    return Decision(plan, request.describe(), _predicted(workload, plan, cost), profile)


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
