"""Tensor selection: which parameters are sparsified, each decided by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.plans.plan import ParameterFacts


@dataclass(frozen=True)
class MinElements:
    """A rule for `tensor_selection`: parameters of fewer elements stay dense; an `ArgumentError` below 1.

    Example:
        >>> min_elements(1024)(ParameterFacts("bias", 512))
        False
    """

    num_elements: int

    def __post_init__(self) -> None:
        check_count("min_elements", self.num_elements)

    def __call__(self, parameter: ParameterFacts) -> bool:
        return parameter.num_elements >= self.num_elements


min_elements = MinElements


#: What the argument `tensor_selection` takes: "cost", "all", `min_elements(...)`, or a function that says
#: of a parameter whether it is sparsified.
TensorSelection: TypeAlias = str | Callable[[ParameterFacts], bool]


def select_tensors(
    rule: TensorSelection, parameters: Sequence[ParameterFacts], cost: CostModel | None = None
) -> frozenset[str]:
    """Returns the names of the parameters that stay dense, each decided by itself.

    ``sparsify if and only if T_comp(n) < T_full(n) - T_spr(n)`` for "cost"

    Eq. (1) takes every tensor alone: its whole communication counts, hidden or not, and each pays its own
    start-up time. So it keeps small tensors dense that, merged, would be sparsified.

    Args:
        rule: "cost", "all", `min_elements(...)`, or a function of a parameter (True: sparsify it).
        parameters: of the model.
        cost: selection is T_comp (decoding may stand in communication: only the sum matters),
            communication T_spr, dense T_full. "cost" needs it.

    Source: DRAGONN, section 4.2, Eq. (1) and Algorithm 2.

    Raises:
        UnknownNameError: for a misspelt rule.
        ArgumentError: "cost" without a cost model, or a rule that answers something else than yes or no.

    Example:
        >>> from horovod_sparse.cost import AffineTime
        >>> cost = CostModel(AffineTime(1.0), AffineTime(1.0), AffineTime(1.0, 0.25))
        >>> sorted(select_tensors("cost", [ParameterFacts("a", 1), ParameterFacts("b", 2)], cost))
        ['a']
    """
    if isinstance(rule, str):
        if rule == "all":
            return frozenset()
        if rule != "cost":
            raise UnknownNameError("tensor_selection", rule, ["all", "cost", "min_elements(...)"])
        if cost is None:
            raise ArgumentError("tensor_selection", rule, "a profile too, or 'all', which needs none")
        return frozenset(parameter.name for parameter in parameters if not _pays(parameter, cost))
    if not callable(rule):
        raise ArgumentError("tensor_selection", rule, "'cost', 'all', min_elements(...) or a function")
    answers = {parameter.name: rule(parameter) for parameter in parameters}
    for name, answer in answers.items():
        if answer not in (True, False):
            raise ArgumentError("tensor_selection", answer, f"True or False for {name}")
    return frozenset(name for name, answer in answers.items() if not answer)


def _pays(parameter: ParameterFacts, cost: CostModel) -> bool:
    """Eq. (1) of DRAGONN."""
    compression = float(cost.selection.seconds(parameter.num_elements))
    sparse = float(cost.communication.seconds(parameter.num_elements))
    full = float(cost.dense.seconds(parameter.num_bytes) + cost.dense_work.seconds(parameter.num_elements))
    return compression < full - sparse
