"""Selection and merging decided together."""

from __future__ import annotations

from collections.abc import Iterable

from horovod_sparse.cost import CostModel
from horovod_sparse.merging.optimal import search_plan
from horovod_sparse.merging.plan import Plan
from horovod_sparse.merging.selection import dense_of, select_tensors
from horovod_sparse.merging.timeline import predict
from horovod_sparse.merging.workload import Workload

__all__ = ["joint"]

#: Sizes that are tried as the border between dense and sparse.
_NUM_BORDERS = 12
#: Rounds over the buckets of the best plan.
_NUM_ROUNDS = 2


def joint(workload: Workload, cost: CostModel) -> Plan:
    """Chooses what stays dense and what is merged by the time of the whole step.

    `select_tensors` judges every tensor alone, and `optimal` merges what is left. But a tensor too small
    to be sparsified alone may be worth it within a bucket, and one that is large enough may be sent for
    nothing while backward goes on. So candidates are compared as whole steps (`predict`):
    all sparse, all dense, Eq. (1), a border of size at a dozen places either way; then, from the best
    of them, whole buckets that turn dense, and dense parameters that turn sparse.

    Args:
        workload: the step; its own `dense` stay dense in every candidate.
        cost: of selection, communication and dense allreduce.

    Returns:
        The best plan found. Never slower, by the model, than all sparse, all dense, or Eq. (1), each with
        `optimal` merging. A search, not a proof: better plans may exist.

    Example:
        >>> from horovod_sparse.cost import AffineTime
        >>> from horovod_sparse.merging import ParameterFacts
        >>> workload = Workload((ParameterFacts("a", 10), ParameterFacts("b", 1000)), (1.0, 1.0))
        >>> print(joint(workload, CostModel(AffineTime(2.0), AffineTime(1.0), AffineTime(0.5, 0.01))))
        1 bucket of 1 parameters; 1 parameter stays dense
    """
    forced, every = workload.dense, {parameter.name for parameter in workload.parameters}
    seen: dict[frozenset[str], tuple[float, Plan]] = {}

    def consider(dense: Iterable[str], *, quick: bool = True) -> None:
        chosen = forced | frozenset(dense)
        if quick and chosen in seen:
            return
        step = workload.with_dense(chosen)
        plan = search_plan(step, cost, quick=quick)
        seconds = predict(step, plan, cost).iteration_seconds
        if chosen not in seen or seconds < seen[chosen][0]:
            seen[chosen] = seconds, plan

    for first in ((), every, dense_of(select_tensors("cost", workload.parameters, cost))):
        consider(first, quick=False)
    by_size = sorted(workload.sparse, key=lambda parameter: parameter.num_elements)
    for number in range(1, _NUM_BORDERS):
        border = len(by_size) * number // _NUM_BORDERS
        consider(parameter.name for parameter in by_size[:border])
        consider(parameter.name for parameter in by_size[border:])
    for _ in range(_NUM_ROUNDS):
        before, plan = min(seen.values(), key=lambda found: found[0])
        dense = frozenset(plan.dense)
        for bucket in sorted(plan.buckets, key=len)[:_NUM_BORDERS]:
            consider(dense | set(bucket))
        free = [name for name in plan.dense if name not in forced]
        size = -(-len(free) // _NUM_BORDERS) or 1
        for start in range(0, len(free), size):
            consider(dense - set(free[start : start + size]))
        if min(seconds for seconds, _ in seen.values()) >= before:
            break
    fastest = min(seen, key=lambda chosen: seen[chosen][0])
    consider(fastest, quick=False)
    # of equal times, the one with the fewest buckets
    return min(seen.values(), key=lambda found: (found[0], len(found[1].buckets)))[1]
