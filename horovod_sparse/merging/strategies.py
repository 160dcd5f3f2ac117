"""Strategies by name: functions of a step and its costs that return a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from horovod_sparse.cost import CostModel
from horovod_sparse.errors import ArgumentError
from horovod_sparse.merging.fixed import fixed_bytes, fixed_elements
from horovod_sparse.merging.plan import MAX_BUCKET_ELEMENTS, Plan
from horovod_sparse.merging.workload import Workload

__all__ = ["Fixed", "Strategy", "fixed", "layerwise", "single"]

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
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ArgumentError(name, value, "a whole number, 1 or more")
    return Fixed(num_elements, bytes)


def _with_dense(workload: Workload, plan: Plan) -> Plan:
    return Plan(plan.buckets, workload.dense_names)
