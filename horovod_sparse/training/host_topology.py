"""Which ranks share a host: every rank says where it is in the first step after every start.

Until then a training has no hosts, or those of the checkpoint that it has loaded.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

from horovod_sparse.checks import whole_number
from horovod_sparse.collectives import Synchronization, shared_lines
from horovod_sparse.errors import ArgumentError
from horovod_sparse.topology import Topology

#: as if so many ranks, one behind the other, had a host of their own: for tests, and for hosts in which the
#: fast network joins some of the ranks only
RANKS_VARIABLE = "HOROVOD_SPARSE_RANKS_PER_HOST"


@dataclass(frozen=True)
class ClusterFacts:
    """What is known of a cluster before anything is measured; a `Profile` repeats it.

    `rank` and `size` count within the process set, `controller` is Horovod's or the backend of
    torch.distributed, `device` is in words, and `topology` is None with one level.
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
        """Returns the facts of a process set, by Horovod's binding for a framework."""
        rank, size = int(process_set.rank()), int(process_set.size())
        return cls(rank, size, framework, "mpi" if hvd.mpi_enabled() else "gloo", cycle_seconds(), device)


def cycle_seconds() -> float:
    """Returns Horovod's cycle time, as its environment variable sets it; 1 ms without one."""
    text = os.environ.get("HOROVOD_CYCLE_TIME", "1")
    try:
        return float(text) / 1e3
    except ValueError:
        raise ArgumentError("HOROVOD_CYCLE_TIME", text, "milliseconds") from None


@dataclass(frozen=True)
class Ranks:
    """Where one rank stands: among those that synchronize, among all that were launched, and on its host."""

    rank: int
    size: int
    world_rank: int
    world_size: int
    #: the same name on all of its ranks
    host: str
    host_rank: int
    host_size: int

    @classmethod
    def of_horovod(cls, hvd: Any, process_set: Any) -> Ranks:
        """Returns the place of a rank of a binding of Horovod that has been started."""
        # where hosts are of different sizes, a cross rank counts those that have a rank at this place only
        host = hvd.cross_rank() if _are_alike(hvd) else os.environ.get("HOROVOD_HOSTNAME") or platform.node()
        own = int(process_set.rank()), int(process_set.size()), int(hvd.rank()), int(hvd.size())
        return cls(*own, str(host), int(hvd.local_rank()), int(hvd.local_size()))


def own_place(ranks: Ranks) -> tuple[str, int]:
    """Returns a rank's host, and its place on it."""
    asked = os.environ.get(RANKS_VARIABLE, "").strip()
    if not asked:
        return f"host {ranks.host}", ranks.host_rank
    per_host = whole_number(asked)
    if per_host < 1:
        raise ArgumentError(RANKS_VARIABLE, asked, "a number of ranks, from 1")
    host, local = divmod(ranks.world_rank, per_host)
    return f"host {host}", local


def _are_alike(hvd: Any) -> bool:
    """True if all hosts have as many ranks; the same on all ranks."""
    asked = getattr(hvd, "is_homogeneous", None) or getattr(hvd.mpi_ops, "is_homogeneous", None)
    return asked is None or bool(asked())


def launched_hosts(levels: str, here: Ranks) -> Topology | None:
    """Returns the hosts that the cost of a plan is estimated for; None for one level. No collective."""
    per_host = int(os.environ.get(RANKS_VARIABLE, "").strip() or here.host_size)
    if levels == "flat" or here.size != here.world_size or here.size % per_host:
        return None
    return Topology.regular(here.size // per_host, per_host)


def agreed_topology(place: tuple[str, int]) -> Synchronization[Topology]:
    """Returns which ranks share a host, from the place that each gives (`own_place`). One collective."""
    return Topology.of([(host, local) for host, local in (yield from shared_lines(place))])
