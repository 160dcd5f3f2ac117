"""What stays dense where nobody has said anything of buckets: those that by formulas cannot win."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.collectives import Level
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.plans.network import COLLECTIVES, AlphaBeta, collective_seconds
from horovod_sparse.plans.plan import ParameterFacts, Plan
from horovod_sparse.sparsifiers import BucketInfo, Sparsifier
from horovod_sparse.topology import Topology

_log = logging.getLogger("horovod_sparse")

#: what is sparsified where the arguments say nothing of buckets: "formulas", all buckets that may win by
#: them, or "all". The first rank's counts.
TENSOR_SELECTION_VARIABLE = "HOROVOD_SPARSE_TENSOR_SELECTION"

#: between hosts nothing slower is taken than Gigabit Ethernet, so that a network nobody has told of counts in
#: favour of sparsifying
BETWEEN_HOSTS = AlphaBeta(50e-6, 8e-9)
#: between processes of one host: two of Horovod's need 0.3 to 1 ns for a byte, by Gloo's loopback or MPI's
#: shared memory
IN_MEMORY = AlphaBeta(20e-6, 0.5e-9)
#: between devices of one host: PCIe 4.0 with 16 lanes
BETWEEN_DEVICES = AlphaBeta(20e-6, 0.04e-9)
#: of a round beside Horovod's cycle and the network: negotiation, and until the rank has noticed its end
#: (docs/performance.md)
ROUND_SECONDS = 2.5e-4
#: of a bucket, whatever is in it: its coroutine, its messages, and that it begins with its last gradient
BUCKET_SECONDS = 5e-4
#: of selection and decoding, and of each element: a step of top-k among 8 ranks on a busy core, twice what
#: docs/measurements/local.json has of a quiet one; a device works at its memory's rate
SELECTION_SECONDS, ELEMENT_SECONDS, DEVICE_ELEMENT_SECONDS = 1e-4, 1e-9, 3e-11
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
        one_host: whether all ranks of the job are on the same host.
        topology: which ranks share a host, where their gradients are summed first; None with one level.
    """

    rank: int
    size: int
    framework: str
    controller: str
    cycle_seconds: float = 0.001
    device: str = "cpu"
    one_host: bool = False
    topology: Topology | None = None

    @classmethod
    def of(cls, process_set: Any, framework: str, hvd: Any, device: str = "cpu") -> ClusterFacts:
        """Of a process set of Horovod's, by its binding for a framework."""
        rank, size = int(process_set.rank()), int(process_set.size())
        controller, alone = "mpi" if hvd.mpi_enabled() else "gloo", hvd.local_size() == hvd.size()
        return cls(rank, size, framework, controller, cycle_seconds(), device, alone)


def cycle_seconds() -> float:
    """Horovod's cycle time, as its environment variable sets it; 1 ms without one."""
    text = os.environ.get("HOROVOD_CYCLE_TIME", "1")
    try:
        return float(text) / 1e3
    except ValueError:
        raise ArgumentError("HOROVOD_CYCLE_TIME", text, "milliseconds") from None


def sparsifies_by_formulas() -> bool:
    """Whether buckets that cannot win stay dense where the arguments say nothing of buckets."""
    wanted, known = os.environ.get(TENSOR_SELECTION_VARIABLE, "formulas"), ("formulas", "all")
    if wanted not in known:
        raise UnknownNameError(TENSOR_SELECTION_VARIABLE, wanted, known)
    return wanted == "formulas"


def bytes_by_round(sparsifier: Sparsifier, size: int, num_elements: int) -> Iterator[tuple[str, int]]:
    """What the busiest rank declares to put into every round, once a schedule of densities has ended."""
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
    """The share of elements that come back from so many ranks, duplicates counted each."""
    return min(1.0, sparsifier.density) * (size if sparsifier.density_scope == "per rank" else 1)


def bucket_seconds(
    sparsifier: Sparsifier, cluster: ClusterFacts, num_elements: int, num_bytes: int
) -> tuple[float, float, float]:
    """By formulas, of a bucket: its selection, its communication, and its allreduce if it stayed dense.

    Every round costs a cycle of Horovod's and `ROUND_SECONDS` besides, whatever it carries: a sparsifier has
    one or more of them where an allreduce has one, which loses a small bucket.
    """
    on_device, per_host = (
        cluster.device != "cpu",
        1 if cluster.topology is None else cluster.topology.per_host,
    )
    inside = BETWEEN_DEVICES if on_device else IN_MEMORY
    network, hosts = inside if cluster.one_host else BETWEEN_HOSTS, cluster.size // per_host
    wait, on_mpi = cluster.cycle_seconds + ROUND_SECONDS, cluster.controller == "mpi"

    def seconds(kind: str, level: Level, amount: float) -> float:
        fixed, each = collective_seconds(kind, level, network, hosts, per_host, inside)
        # messages between two ranks go beside Horovod over MPI; those of one level are all of that sort
        by_pairs = on_mpi and (kind == "exchange" or level != "all")
        return fixed + each * amount + (0.0 if by_pairs else wait)

    level: Level = "all" if per_host == 1 else "across"
    n = max(1, num_elements // per_host)
    each = DEVICE_ELEMENT_SECONDS if on_device else ELEMENT_SECONDS
    selection = BUCKET_SECONDS + SELECTION_SECONDS + each * n
    sparse = 0.0
    if hosts > 1:
        rounds = bytes_by_round(sparsifier, hosts, n)
        sparse = math.fsum(seconds(kind, level, put) for kind, put in rounds)
    if per_host > 1:
        sparse += seconds("reducescatter", "host", VALUE_BYTES * num_elements)
        sparse += seconds("allgather", "host", SELECTED_BYTES * received_share(sparsifier, hosts) * n)
    return selection, sparse, seconds("allreduce", "all", num_bytes)


def by_formulas(
    plan: Plan, parameters: Sequence[ParameterFacts], sparsifier: Sparsifier, cluster: ClusterFacts
) -> tuple[Plan, str]:
    """The plan without the buckets that cannot win, and why in words; empty where all may.

    What a rule of the recipe gives a density of its own stays as it is: somebody has thought of it. One rank
    sparsifies as each of many would. So does elastic training, where the number of ranks changes, and workers
    that join meet others that have decided already.
    """
    if cluster.size == 1 or os.environ.get("HOROVOD_ELASTIC") == "1":
        return plan, ""
    facts = {parameter.name: parameter for parameter in parameters}
    kept: list[tuple[str, ...]] = []
    left, dense_seconds, sparse_seconds = list(plan.dense), 0.0, 0.0
    for names in plan.buckets:
        total = sum(facts[name].num_elements for name in names)
        num_bytes = sum(facts[name].num_bytes for name in names)
        selection, sparse, dense = bucket_seconds(sparsifier, cluster, total, num_bytes)
        if facts[names[0]].density or selection + sparse < dense:
            kept.append(names)
        else:
            left += names
            dense_seconds, sparse_seconds = dense_seconds + dense, sparse_seconds + selection + sparse
    if not dense_seconds:
        return plan, ""
    number, total = sum(facts[name].num_elements for name in left), sum(f.num_elements for f in parameters)
    network = f"{cluster.size} ranks {'on one host' if cluster.one_host else 'at 1 Gbit/s'}"
    sparse_ms, dense_ms = 1e3 * sparse_seconds, 1e3 * dense_seconds
    words = (
        f"{'parts of this model are' if kept else 'this model is'} too small to gain from {sparsifier.name} "
        f"on this network ({network}): sparsifying {number:,} of {total:,} elements would make a step "
        f"{sparse_ms - dense_ms:.3g} ms longer by formulas ({sparse_ms:.3g} in place of {dense_ms:.3g}), so "
        "they stay dense"
    )
    if cluster.rank == 0:
        told = "tensor_selection='all' sparsifies all the same"
        _log.warning("%s. %s, and so does %s=all", words, told, TENSOR_SELECTION_VARIABLE)
    return dataclasses.replace(plan, buckets=tuple(kept), dense=tuple(left)), words
