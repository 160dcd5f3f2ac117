"""Facts of a cluster, what a sparsifier sends in it, and which buckets are too small for one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.plans.network import COLLECTIVES
from horovod_sparse.plans.plan import ParameterFacts, Plan
from horovod_sparse.sparsifiers import BucketInfo, Sparsifier
from horovod_sparse.topology import Topology

#: What is sparsified where the arguments say nothing of buckets: "large", those of `DENSE_BELOW` elements or
#: more, or "all". The first rank's counts.
TENSOR_SELECTION_VARIABLE = "HOROVOD_SPARSE_TENSOR_SELECTION"
#: At 1 Gbit/s an allreduce of so many float32 takes 4 ms: as long as three rounds of a sparsifier, each a
#: cycle of Horovod's (1 ms) and 0.25 ms besides (docs/performance.md), and half a millisecond of work for a
#: bucket. A smaller one gains nothing; on faster networks a bucket has to be larger still.
DENSE_BELOW = 1 << 16
#: of an element that is summed within a host (half types as float32), and of an index with its value
VALUE_BYTES, SELECTED_BYTES = 4, 8


@dataclass(frozen=True)
class ClusterFacts:
    """What is known of a cluster before anything is measured, and written into a `Profile` that is.

    Attributes:
        rank: of this process, within the process set.
        size: P.
        framework: "torch" or "tensorflow".
        controller: Horovod's, "gloo" or "mpi", or the backend of torch.distributed.
        cycle_seconds: Horovod's cycle time.
        device: in words.
        topology: which ranks share a host, where their gradients are summed first; None with one level.
    """

    rank: int
    size: int
    framework: str
    controller: str
    cycle_seconds: float = 0.001
    device: str = "cpu"
    topology: Topology | None = None

    @classmethod
    def of(cls, process_set: Any, framework: str, hvd: Any, device: str = "cpu") -> ClusterFacts:
        """Of a process set of Horovod's, by its binding for a framework."""
        rank, size = int(process_set.rank()), int(process_set.size())
        controller = "mpi" if hvd.mpi_enabled() else "gloo"
        return cls(rank, size, framework, controller, cycle_seconds(), device)


def cycle_seconds() -> float:
    """Horovod's cycle time, as its environment variable sets it; 1 ms without one."""
    text = os.environ.get("HOROVOD_CYCLE_TIME", "1")
    try:
        return float(text) / 1e3
    except ValueError:
        raise ArgumentError("HOROVOD_CYCLE_TIME", text, "milliseconds") from None


def without_small_buckets(plan: Plan, parameters: Sequence[ParameterFacts]) -> tuple[Plan, str]:
    """Returns the plan with small buckets dense, and a sentence about them; empty if there are none.

    A bucket whose density a rule of the recipe gives stays as it is.
    """
    wanted, known = os.environ.get(TENSOR_SELECTION_VARIABLE, "large"), ("large", "all")
    if wanted not in known:
        raise UnknownNameError(TENSOR_SELECTION_VARIABLE, wanted, known)
    facts = {parameter.name: parameter for parameter in parameters}

    def stays_sparse(names: tuple[str, ...]) -> bool:
        given = facts[names[0]].density > 0.0
        return given or sum(facts[name].num_elements for name in names) >= DENSE_BELOW

    kept = tuple(filter(stays_sparse, plan.buckets))
    if wanted == "all" or len(kept) == len(plan.buckets):
        return plan, ""
    left = tuple(name for names in plan.buckets if names not in kept for name in names)
    number, total = (sum(facts[name].num_elements for name in names) for names in (left, facts))
    words = (
        f"{number:,} of {total:,} elements stay dense: buckets of fewer than {DENSE_BELOW:,} gain nothing "
        "from a sparsifier"
    )
    return dataclasses.replace(plan, buckets=kept, dense=plan.dense + left), words


def bytes_by_round(sparsifier: Sparsifier, size: int, num_elements: int) -> Iterator[tuple[str, int]]:
    """Yields the bytes that the busiest rank sends in every round, at the final density of a schedule."""
    selected = max(1, round(sparsifier.density * num_elements))
    if sparsifier.density_scope != "per rank":
        from horovod_sparse.sparsifiers.exclusive import ExclusiveThreshold  # which top-k does without

        # windows that exclude each other share k out; elsewhere every rank's own count is k
        if isinstance(sparsifier, ExclusiveThreshold):
            selected = max(1, round(selected / size))
    counts = np.full(size, selected, np.int64)
    by_rank = [
        sparsifier.traffic(BucketInfo("bucket", num_elements, rank, size, "float32"), counts)
        for rank in range(min(size, 4))  # ranks may play different parts: a broadcast has a root
    ]
    for traffic in zip(*by_rank, strict=True):
        yield COLLECTIVES[traffic[0].kind], max(item.bytes_sent for item in traffic)


def received_share(sparsifier: Sparsifier, size: int) -> float:
    """Returns the share of elements that a rank receives, with duplicates."""
    return min(1.0, sparsifier.density) * (size if sparsifier.density_scope == "per rank" else 1)
