"""What is sparsified, and how densely: by cost, one by one, and by a step's length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback import AutoDensity
from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.plans.plan import ParameterFacts, Plan


@dataclass(frozen=True)
class Choice:
    """What was decided for a parameter, and why.

    Attributes:
        name: of the parameter.
        dense: whether it stays dense.
        reason: in words, for a table.
    """

    name: str
    dense: bool
    reason: str


@dataclass(frozen=True)
class MinElements:
    """Sparsify what has at least so many elements; a rule made by `min_elements`."""

    num_elements: int

    def __call__(self, parameter: ParameterFacts) -> bool:
        """Whether the parameter is sparsified."""
        return parameter.num_elements >= self.num_elements


#: What the argument `tensor_selection` takes: "cost", "all", `min_elements(...)`, or a function that says
#: of a parameter whether it is sparsified.
TensorSelection: TypeAlias = str | Callable[[ParameterFacts], bool]


def min_elements(num_elements: int) -> MinElements:
    """A rule for `tensor_selection`: smaller parameters stay dense.

    Args:
        num_elements: the smallest that is sparsified, 1 or more.

    Raises:
        ArgumentError: if it is not a whole number from 1.

    Example:
        >>> min_elements(1024)(ParameterFacts("bias", 512))
        False
    """
    check_count("min_elements", num_elements)
    return MinElements(num_elements)


def select_tensors(
    rule: TensorSelection, parameters: Sequence[ParameterFacts], cost: CostModel | None = None
) -> tuple[Choice, ...]:
    """Decides for every parameter by itself whether it is sparsified.

    ``sparsify if and only if T_comp(n) < T_full(n) - T_spr(n)`` for "cost"

    Eq. (1) takes every tensor alone: its whole communication counts, hidden or not, and each pays its own
    start-up time. So it keeps small tensors dense that, merged, would be sparsified.

    Args:
        rule: "cost", "all", `min_elements(...)`, or a function of a parameter (True: sparsify it).
        parameters: of the model.
        cost: selection is T_comp (decoding may stand in communication: only the sum matters),
            communication T_spr, dense T_full. "cost" needs it.

    Returns:
        One choice for every parameter, in their order.

    Source: DRAGONN, section 4.2, Eq. (1) and Algorithm 2.

    Raises:
        UnknownNameError: for a misspelt rule.
        ArgumentError: "cost" without a cost model, or a rule that answers something else than yes or no.

    Example:
        >>> from horovod_sparse.cost import AffineTime
        >>> cost = CostModel(AffineTime(1.0), AffineTime(1.0), AffineTime(1.0, 0.25))
        >>> [c.dense for c in select_tensors("cost", [ParameterFacts("a", 1), ParameterFacts("b", 2)], cost)]
        [True, False]
    """
    if isinstance(rule, str):
        if rule == "all":
            return tuple(Choice(parameter.name, False, "all are sparsified") for parameter in parameters)
        if rule != "cost":
            raise UnknownNameError("tensor_selection", rule, ["all", "cost", "min_elements(...)"])
        if cost is None:
            raise ArgumentError("tensor_selection", rule, "a profile too, or 'all', which needs none")
        return tuple(_by_cost(parameter, cost) for parameter in parameters)
    if not callable(rule):
        raise ArgumentError("tensor_selection", rule, "'cost', 'all', min_elements(...) or a function")
    return tuple(_by_rule(parameter, rule) for parameter in parameters)


def dense_of(choices: Sequence[Choice]) -> frozenset[str]:
    """Names of what stays dense, for `Workload.with_dense`."""
    return frozenset(choice.name for choice in choices if choice.dense)


def _by_cost(parameter: ParameterFacts, cost: CostModel) -> Choice:
    compression = float(cost.selection.seconds(parameter.num_elements))
    sparse = float(cost.communication.seconds(parameter.num_elements))
    full = float(cost.dense.seconds(parameter.num_bytes) + cost.dense_work.seconds(parameter.num_elements))
    pays = compression < full - sparse
    sign = "<" if pays else ">="
    reason = f"{compression * 1e3:.3g} ms {sign} {full * 1e3:.3g} - {sparse * 1e3:.3g} ms"
    return Choice(parameter.name, not pays, reason)


def _by_rule(parameter: ParameterFacts, rule: Callable[[ParameterFacts], Any]) -> Choice:
    answer = rule(parameter)
    if answer not in (True, False):
        raise ArgumentError("tensor_selection", answer, f"True or False for {parameter.name}")
    if isinstance(rule, MinElements):
        sign = ">=" if answer else "<"
        reason = f"{parameter.num_elements} {sign} {rule.num_elements} elements"
    else:
        reason = f"{getattr(rule, '__name__', repr(rule))} says {'sparse' if answer else 'dense'}"
    return Choice(parameter.name, not answer, reason)


@dataclass(frozen=True)
class DensityChoice:
    """A density, with the plan that goes with it.

    Attributes:
        limits: it was chosen within.
        plan: buckets and density.
        seconds: of the predicted iteration.
        least_seconds: at the least density, under the plan that is best there.
    """

    limits: AutoDensity
    plan: Plan
    seconds: float
    least_seconds: float

    @property
    def density(self) -> float:
        """That was chosen."""
        return self.limits.least if self.plan.density is None else self.plan.density

    @property
    def reason(self) -> str:
        """Why, in words."""
        text = f"density {self.density:g}: predicted iteration {1e3 * self.seconds:.4g} ms, "
        text += f"{1e3 * self.least_seconds:.4g} ms at {self.limits.least:g}; the densest up to "
        return text + f"{self.limits.most:g} that is no more than {self.limits.tolerance:.0%} longer"


def densest_plan(
    limits: AutoDensity,
    plan_at: Callable[[float], Plan],
    seconds_of: Callable[[Plan, float], float],
    at_most: float | None = None,
) -> DensityChoice:
    """The largest of the candidates at which the iteration is at most `tolerance` longer than at the least.

    Bisection over the densities, since an iteration becomes no shorter where more is sent; a plan is made at
    each that is looked at. Where messages are fused that is not quite so: therefore all plans met on the way
    are tried at all densities afterwards, the largest first.

    Args:
        limits: least, most, and tolerance.
        plan_at: makes the plan for a density.
        seconds_of: predicts the iteration of a plan at a density.
        at_most: seconds that an iteration may take, in place of the tolerance.

    Returns:
        The choice; its plan says the density.

    Example:
        >>> whole = Plan((("weight",),))
        >>> limits = AutoDensity(tolerance=0.1)
        >>> choice = densest_plan(limits, lambda density: whole, lambda plan, density: 1 + 5 * density)
        >>> choice.density, choice.reason.partition(":")[0]
        (0.0194, 'density 0.0194')
    """
    candidates = limits.candidates
    plans: dict[Plan, None] = {}

    def best_at(density: float, *, anew: bool = True) -> tuple[float, Plan]:
        if anew:
            plans[plan_at(density)] = None
        found = [(seconds_of(plan, density), plan) for plan in plans]
        return min(found, key=lambda item: item[0])

    least_seconds, _ = best_at(candidates[0])
    most_seconds = least_seconds * (1.0 + limits.tolerance) if at_most is None else at_most
    low, high = 0, len(candidates)
    while high - low > 1:
        # the largest first: where communication is hidden whole, that is all
        middle = high - 1 if (low, high) == (0, len(candidates)) else (low + high) // 2
        low, high = (middle, high) if best_at(candidates[middle])[0] <= most_seconds else (low, middle)
    for position in range(len(candidates) - 1, low, -1):
        if best_at(candidates[position], anew=False)[0] <= most_seconds:
            low = position
            break
    density = candidates[low]
    seconds, plan = best_at(density, anew=False)
    return DensityChoice(limits, dataclasses.replace(plan, density=density), seconds, least_seconds)
