"""Strategies that go by size alone, or keep what was decided: no times are looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError
from horovod_sparse.planning.cost_model import CostModel
from horovod_sparse.planning.workload import Workload
from horovod_sparse.plans.fixed import fixed_bytes, fixed_elements
from horovod_sparse.plans.plan import MAX_BUCKET_ELEMENTS, Plan

Strategy: TypeAlias = Callable[[Workload, CostModel], Plan]


def layerwise(workload: Workload, cost: CostModel | None = None) -> Plan:
    """A bucket for every parameter (LAGS-SGD).

    Args:
        workload: whose sparse parameters are merged; its times do not matter here.
        cost: not looked at.
    """
    return _with_dense(workload, fixed_elements(workload.sparse, 1))


def single(workload: Workload, cost: CostModel | None = None) -> Plan:
    """One bucket of everything, or as few as kinds and int32 allow (TopK-SGD).

    Args:
        workload: whose sparse parameters are merged; its times do not matter here.
        cost: not looked at.
    """
    return _with_dense(workload, fixed_elements(workload.sparse, MAX_BUCKET_ELEMENTS))


@dataclass(frozen=True)
class Fixed:
    """Buckets by size alone; a strategy made by `fixed`.

    Args:
        num_elements: buckets of at least so many elements, or None.
        num_bytes: buckets of at most so many bytes, or None.
    """

    num_elements: int | None = None
    num_bytes: int | None = None

    def __call__(self, workload: Workload, cost: CostModel | None = None) -> Plan:
        """The plan; times and costs are not looked at."""
        if self.num_elements is not None:
            return _with_dense(workload, fixed_elements(workload.sparse, self.num_elements))
        if self.num_bytes is None:
            raise ArgumentError("fixed", self, "num_elements or bytes")
        return _with_dense(workload, fixed_bytes(workload.sparse, self.num_bytes))


def fixed(*, num_elements: int | None = None, bytes: int | None = None) -> Fixed:
    """A strategy that goes by size: MGS-SGD's threshold, or Horovod's way of filling a buffer.

    Args:
        num_elements: a bucket is closed once it holds so many elements (MGS-SGD; the paper has 8192).
        bytes: a bucket is closed before it would exceed so many bytes of gradient.

    Raises:
        ArgumentError: unless exactly one is given, a whole number from 1.

    Example:
        >>> fixed(num_elements=8192)
        Fixed(num_elements=8192, num_bytes=None)
    """
    given = {"num_elements": num_elements, "bytes": bytes}
    if sum(value is not None for value in given.values()) != 1:
        raise ArgumentError("fixed", given, "either num_elements or bytes")
    for name, value in given.items():
        if value is not None:
            check_count(name, value)
    return Fixed(num_elements, bytes)


@dataclass(frozen=True)
class Kept:
    """The plan that was made already, whatever times say; parameters that it does not know fill buckets.

    Args:
        plan: None where none is made yet.
    """

    plan: Plan | None = None

    def __call__(self, workload: Workload, cost: CostModel | None = None) -> Plan:
        """The plan, of the parameters that there are; costs are not looked at."""
        kept = Plan(()) if self.plan is None else self.plan
        dense = workload.dense | set(kept.dense)
        free = {parameter.name for parameter in workload.parameters} - dense
        buckets = [tuple(name for name in bucket if name in free) for bucket in kept.buckets]
        known = {name for bucket in buckets for name in bucket}
        others = [one for one in workload.parameters if one.name in free - known]
        left = tuple(one.name for one in workload.backward if one.name in dense)
        return Plan(tuple(filter(None, buckets)) + fixed_bytes(others).buckets, left)


def _with_dense(workload: Workload, plan: Plan) -> Plan:
    return Plan(plan.buckets, workload.dense_names)
