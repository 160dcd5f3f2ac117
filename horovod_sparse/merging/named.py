"""The argument `merging=`: from a name, a strategy or a plan to what is meant."""

from __future__ import annotations

from typing import Any

from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.merging.fixed import Fixed, Kept, Strategy, layerwise, single
from horovod_sparse.merging.greedy import omgs
from horovod_sparse.merging.optimal import optimal
from horovod_sparse.merging.selection import joint

#: What `merging=` takes by name; `fixed(...)` takes an argument and so is given itself.
STRATEGIES: dict[str, Strategy] = {
    "layerwise": layerwise,
    "single": single,
    "omgs": omgs,
    "optimal": optimal,
    "joint": joint,
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
