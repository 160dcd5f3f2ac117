"""Ranks that share a host, for synchronization in two levels; and each rank's placement.

Ranks exchange their hosts in the first step after every start. Until then a training's topology is unknown,
or that of its checkpoint.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_sparse.checks import whole_number
from horovod_sparse.collectives import Level
from horovod_sparse.errors import ArgumentError, UnsupportedError

#: as if so many ranks, one behind the other, had a host of their own: for tests, and for hosts in which the
#: fast network joins some of the ranks only
RANKS_VARIABLE = "HOROVOD_SPARSE_RANKS_PER_HOST"

RankIds = tuple[int, ...]
#: this rank, and the number of ranks
RankAndSize = tuple[int, int]


@dataclass(frozen=True)
class Topology:
    """Says which ranks share a host: N hosts with L ranks each.

    A *column* consists of one rank of every host: those with the same number on their hosts.

    Example:
        >>> topology = Topology(((0, 1), (2, 3), (4, 5)))
        >>> topology.position(3), topology.group("host", 3), topology.group("across", 3)
        ((1, 1), (2, 3), (1, 3, 5))
    """

    hosts: tuple[RankIds, ...]

    def __post_init__(self) -> None:
        if sorted(rank for host in self.hosts for rank in host) != list(range(self.size)) or not self.size:
            raise ArgumentError("hosts", self.hosts, "all ranks from 0, each on one host")
        if len({len(host) for host in self.hosts}) > 1:
            told = ", ".join(f"host {number}: {len(host)}" for number, host in enumerate(self.hosts))
            raise UnsupportedError(
                f"two levels need as many ranks on every host ({told}); start as many on each, or use "
                "levels='flat'"
            )

    @classmethod
    def regular(cls, num_hosts: int, per_host: int) -> Topology:
        """Returns the topology that puts ranks 0 to L - 1 on the first host, and so on."""
        return cls(tuple(tuple(range(host * per_host, (host + 1) * per_host)) for host in range(num_hosts)))

    @classmethod
    def of(cls, positions: Sequence[tuple[str, int]]) -> Topology:
        """Returns the topology, given each rank's host and its number on that host.

        Example:
            >>> Topology.of([("b", 1), ("a", 0), ("b", 0), ("a", 1)]).hosts
            ((2, 0), (1, 3))
        """
        hosts: dict[str, list[tuple[int, int]]] = {}
        for rank, (host, local) in enumerate(positions):
            hosts.setdefault(host, []).append((local, rank))
        return cls(tuple(tuple(rank for _, rank in sorted(host)) for host in hosts.values()))

    @property
    def num_hosts(self) -> int:
        """N, the number of hosts."""
        return len(self.hosts)

    @property
    def per_host(self) -> int:
        """L, the number of ranks on each host."""
        return len(self.hosts[0])

    @property
    def size(self) -> int:
        """P = N * L, the number of ranks."""
        return sum(map(len, self.hosts))

    @functools.cached_property
    def columns(self) -> tuple[RankIds, ...]:
        """The groups of ranks with the same number on their hosts, one rank of each host."""
        return tuple(zip(*self.hosts, strict=True))

    def groups(self, level: Level) -> tuple[RankIds, ...]:
        """Returns the groups of ranks that communicate at a level: all, each host's, or each column."""
        return {"all": (tuple(range(self.size)),), "host": self.hosts, "across": self.columns}[level]

    def group(self, level: Level, rank: int) -> RankIds:
        """Returns the ranks that communicate with this rank at a level, itself included."""
        return next(ranks for ranks in self.groups(level) if rank in ranks)

    def position(self, rank: int) -> tuple[int, int]:
        """Returns the number of a rank's host, and the rank's number on it."""
        host = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        return host, self.hosts[host].index(rank)


@dataclass(frozen=True)
class ClusterFacts:
    """Describes a cluster without measurements: its ranks, framework, controller and device.

    `rank` and `size` count within the process set, `controller` is Horovod's or the backend of
    torch.distributed, and `device` is in words.
    """

    rank: int
    size: int
    framework: str
    controller: str
    cycle_seconds: float = 0.001
    device: str = "cpu"

    @classmethod
    def of(cls, process_set: Any, framework: str, hvd: Any, device: str = "cpu") -> ClusterFacts:
        """Returns the facts about a Horovod process set; `hvd` is Horovod's module for the framework."""
        rank, size = int(process_set.rank()), int(process_set.size())
        return cls(rank, size, framework, "mpi" if hvd.mpi_enabled() else "gloo", cycle_seconds(), device)


def cycle_seconds() -> float:
    """Returns Horovod's cycle time by its environment variable, 1 ms by default."""
    text = os.environ.get("HOROVOD_CYCLE_TIME", "1")
    try:
        return float(text) / 1e3
    except ValueError:
        raise ArgumentError("HOROVOD_CYCLE_TIME", text, "a number of milliseconds") from None


@dataclass(frozen=True)
class Placement:
    """A rank's number in its process set and in the launch, its host, and its number on the host."""

    rank: int
    size: int
    world_rank: int
    #: the same name on all of its ranks
    host: str
    host_rank: int

    @classmethod
    def of_horovod(cls, hvd: Any, process_set: Any) -> Placement:
        """Returns this rank's placement, once Horovod is initialized; `hvd` is Horovod's module."""
        # where hosts are of different sizes, a cross rank counts those that have a rank at this place only
        asked = getattr(hvd, "is_homogeneous", None) or getattr(hvd.mpi_ops, "is_homogeneous", None)
        alike = asked is None or asked()  # the same on all ranks
        host = hvd.cross_rank() if alike else os.environ.get("HOROVOD_HOSTNAME") or platform.node()
        own = int(process_set.rank()), int(process_set.size()), int(hvd.rank())
        return cls(*own, str(host), int(hvd.local_rank()))

    @classmethod
    def of_torchrun(cls, rank: int, size: int, world_rank: int) -> Placement:
        """Returns this rank's placement, by the variables that torchrun sets."""
        host = os.environ.get("GROUP_RANK", platform.node())
        return cls(rank, size, world_rank, host, int(os.environ.get("LOCAL_RANK", world_rank)))


def own_position(ranks: Placement) -> tuple[str, int]:
    """Returns this rank's host, and its number among the ranks of that host."""
    asked = os.environ.get(RANKS_VARIABLE, "").strip()
    if not asked:
        return f"host {ranks.host}", ranks.host_rank
    if (per_host := whole_number(asked)) < 1:
        raise ArgumentError(RANKS_VARIABLE, asked, "a number of ranks, from 1")
    host, local = divmod(ranks.world_rank, per_host)
    return f"host {host}", local
