"""Makes plans of the user's arguments `merging`, `tensor_selection` and `profile`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError, HorovodSparseError, ProfileMismatchError, UnknownNameError
from horovod_sparse.planning.model import AffineTime, CostModel, Workload, predict
from horovod_sparse.planning.profile import Profile
from horovod_sparse.planning.strategies import Fixed, Strategy, fixed, layerwise, omgs, optimal, single
from horovod_sparse.plans import DEFAULT_BUCKET_BYTES, ParameterFacts, Plan
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.topology import ClusterFacts

_log = logging.getLogger("horovod_sparse")

#: stands in for times that a strategy does not read
_NO_COST = CostModel(AffineTime(), AffineTime())
_DEFAULT = fixed(bytes=DEFAULT_BUCKET_BYTES)
#: the names that `merging=` takes; `fixed(...)` has an argument, so users pass the object
STRATEGIES: dict[str, Strategy] = {
    "layerwise": layerwise,
    "single": single,
    "omgs": omgs,
    "optimal": optimal,
}


@dataclass(frozen=True)
class MinElements:
    """A `tensor_selection` that leaves parameters with fewer elements dense."""

    num_elements: int

    def __post_init__(self) -> None:
        check_count("min_elements", self.num_elements)

    def __call__(self, parameter: ParameterFacts) -> bool:
        return parameter.num_elements >= self.num_elements


min_elements = MinElements
#: what `tensor_selection` takes: "cost", "all", `min_elements(...)`, or a function that returns whether
#: a parameter is sparsified
TensorSelection: TypeAlias = str | Callable[[ParameterFacts], bool]


def select_tensors(
    rule: TensorSelection, parameters: Sequence[ParameterFacts], cost: CostModel | None = None
) -> frozenset[str]:
    """Returns the names of the parameters that stay dense by a rule, which decides about each by itself.

    "cost", which needs `cost`: ``sparsify if and only if T_comp(n) < T_full(n) - T_spr(n)``, where T_comp is
    selection (decoding may stand in communication: only the sum matters), T_spr communication, T_full dense.

    Eq. (1) takes every tensor alone: its whole communication counts, hidden or not, and each pays its own
    start-up time. So it keeps small tensors dense that, merged, would be sparsified.

    Source: DRAGONN, section 4.2, Eq. (1) and Algorithm 2.
    """
    if isinstance(rule, str):
        if rule == "all":
            return frozenset()
        if rule != "cost":
            raise UnknownNameError("tensor_selection", rule, ["all", "cost", "min_elements(...)"])
        if cost is None:
            raise ArgumentError("tensor_selection", rule, "profile= as well, or 'all', which needs none")
        return frozenset(parameter.name for parameter in parameters if not _sparsifying_pays(parameter, cost))
    if not callable(rule):
        raise ArgumentError("tensor_selection", rule, "'cost', 'all', min_elements(...) or a function")
    answers = {parameter.name: rule(parameter) for parameter in parameters}
    for name, answer in answers.items():
        if answer not in (True, False):
            raise ArgumentError("tensor_selection", answer, f"a function that returns a bool for {name}")
    return frozenset(name for name, answer in answers.items() if not answer)


def _sparsifying_pays(parameter: ParameterFacts, cost: CostModel) -> bool:
    n, full = parameter.num_elements, cost.dense.seconds(parameter.num_bytes)
    compression, sparse = cost.selection.seconds(n), cost.communication.seconds(n)
    return bool(compression < full + cost.dense_work.seconds(n) - sparse)


def _as_strategy(merging: Any) -> Strategy:
    """Returns the strategy with the name `merging`, or the given strategy or function; raises on others."""
    if isinstance(merging, str) and merging not in STRATEGIES:
        raise UnknownNameError("merging", merging, [*STRATEGIES, "fixed(num_elements=...)"])
    strategy: Strategy = STRATEGIES[merging] if isinstance(merging, str) else merging
    if not callable(strategy):
        raise ArgumentError("merging", merging, f"one of {sorted(STRATEGIES)}, fixed(...) or a function")
    return strategy


@dataclass(frozen=True)
class Decision:
    """A plan with its reasons: the request, predicted times, and the profile."""

    plan: Plan
    asked: str
    #: seconds of an iteration under this plan ("taken"), and under others
    predicted_seconds: Mapping[str, float]
    #: with backward times: `save` it, and the next run can begin with the plan
    profile: Profile

    def __str__(self) -> str:
        taken, *others = (
            f"{name} {1e3 * seconds:.4g} ms" for name, seconds in self.predicted_seconds.items()
        )
        return f"{self.asked}: {self.plan}; predicted per iteration: {taken}; others: {', '.join(others)}"


@dataclass(frozen=True)
class PlanRequest:
    """A user's request for plans: strategy, tensor selection and profile."""

    #: the arguments as text
    asked: str
    strategy: Strategy
    selection: TensorSelection = "all"
    profile: Profile | None = None
    #: why the profile cannot be used: raised once all ranks know
    failure: HorovodSparseError | None = None

    @classmethod
    def of(cls, merging: Any, tensor_selection: Any, profile: Any, bucket_bytes: int | None) -> PlanRequest:
        """Makes a request of an optimizer's arguments; a profile that does not do becomes its `failure`."""
        if merging is None:
            merging = _DEFAULT if bucket_bytes is None else fixed(bytes=bucket_bytes)
        strategy, selection = _as_strategy(merging), "all" if tensor_selection is None else tensor_selection
        select_tensors(selection, (), _NO_COST)  # raises on anything but a rule
        asked, failure = f"merging={_rule_name(merging)}, tensor_selection={_rule_name(selection)}", None
        if not (profile is None or isinstance(profile, (Profile, str, Path))):
            raise ArgumentError("profile", profile, "a Profile, or the path of a saved one")
        try:
            profile = Profile.load(profile) if isinstance(profile, (str, Path)) else profile
        except ProfileMismatchError as error:
            profile, failure = None, error
        made = cls(asked, strategy, selection, profile, failure)
        if made.needs_times and not (failure or (profile is not None and profile.backward_seconds)):
            allowed = "one with backward times of this model, of hvd.measured_profile(...), for levels='flat'"
            missing = ArgumentError("profile", profile and "one without them", allowed)
            return replace(made, failure=missing)
        return made

    @property
    def needs_times(self) -> bool:
        """True if the plan depends on measured times, so that a profile is needed."""
        return not isinstance(self.strategy, Fixed) or self.selection == "cost"

    def describe(self) -> dict[str, str]:
        """Returns a description of the request, which ranks compare."""
        digest = "no profile" if self.profile is None else self.profile.digest()
        return {"plan": self.asked, "profile": f"none ({self.failure})" if self.failure else digest}

    def plan_without_times(self, parameters: Sequence[ParameterFacts]) -> Plan:
        """Returns the plan without measured times: the default one if the strategy needs times."""
        dense = frozenset(parameter.name for parameter in parameters if parameter.density == 1.0)
        if self.selection != "cost":
            dense |= select_tensors(self.selection, parameters)
        workload = Workload(tuple(parameters), (1.0,) * len(parameters), dense=dense)
        return (_DEFAULT if self.needs_times else self.strategy)(workload, _NO_COST)

    def decide(
        self,
        where: ClusterFacts,
        parameters: Sequence[ParameterFacts],
        sparsifier: Sparsifier,
    ) -> Decision:
        """Returns the plan that the strategy makes from the profile, with its and others' predicted times."""
        profile = self.profile
        assert profile is not None  # else `of` has set `failure`
        for difference in profile.check(where):
            _log.warning("%s", difference)
        workload, cost = profile.workload_and_cost(parameters, sparsifier, where.size)
        dense = workload.dense | select_tensors(self.selection, workload.parameters, cost)
        plan = self.strategy(workload.with_dense(dense), cost)
        plans = {
            "taken": plan,
            "layerwise": layerwise(workload),
            "single": single(workload),
            "fixed 8192": fixed(num_elements=8192)(workload),
            "default": _DEFAULT(workload),
            "all dense": Plan((), tuple(parameter.name for parameter in workload.backward)),
        }
        predicted = {name: predict(workload, one, cost).iteration_seconds for name, one in plans.items()}
        return Decision(plan, self.asked, predicted, profile)


def _rule_name(rule: Any) -> str:
    """Returns a rule's name without memory addresses, so that ranks can compare it."""
    if isinstance(rule, str):
        return rule
    name = getattr(rule, "__name__", type(rule).__name__)
    return repr(rule) if is_dataclass(rule) else str(name)
