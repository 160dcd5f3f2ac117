"""Which ranks share a host: what two levels of synchronization are made of."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_sparse.collectives import Level
from horovod_sparse.errors import ArgumentError, UnsupportedError

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """N hosts of L ranks each.

    A *column* is made of the ranks with the same place on their hosts, one of every host.

    Example:
        >>> topology = Topology(((0, 1), (2, 3), (4, 5)))
        >>> topology.place(3), topology.group("host", 3), topology.group("across", 3)
        ((1, 1), (2, 3), (1, 3, 5))
    """

    hosts: tuple[Ranks, ...]

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
        """The first ranks on the first host, and so on.

        Example:
            >>> Topology.regular(2, 2).hosts
            ((0, 1), (2, 3))
        """
        return cls(tuple(tuple(range(host * per_host, (host + 1) * per_host)) for host in range(num_hosts)))

    @classmethod
    def of(cls, places: Sequence[tuple[str, int]]) -> Topology:
        """Of what ranks tell of themselves.

        Example:
            >>> Topology.of([("b", 1), ("a", 0), ("b", 0), ("a", 1)]).hosts
            ((2, 0), (1, 3))
        """
        hosts: dict[str, list[tuple[int, int]]] = {}
        for rank, (host, local) in enumerate(places):
            hosts.setdefault(host, []).append((local, rank))
        return cls(tuple(tuple(rank for _, rank in sorted(host)) for host in hosts.values()))

    @property
    def num_hosts(self) -> int:
        """N."""
        return len(self.hosts)

    @property
    def per_host(self) -> int:
        """L."""
        return len(self.hosts[0])

    @property
    def size(self) -> int:
        """P = N * L."""
        return sum(map(len, self.hosts))

    @functools.cached_property
    def columns(self) -> tuple[Ranks, ...]:
        """The ranks of every column, in the order of hosts."""
        return tuple(zip(*self.hosts, strict=True))

    def groups(self, level: Level) -> tuple[Ranks, ...]:
        """The groups of ranks that a level is made of."""
        return {"all": (tuple(range(self.size)),), "host": self.hosts, "across": self.columns}[level]

    def group(self, level: Level, rank: int) -> Ranks:
        """The ranks that take part in a rank's requests of a level."""
        return next(ranks for ranks in self.groups(level) if rank in ranks)

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's host, and its place on it."""
        host = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        return host, self.hosts[host].index(rank)

    def __str__(self) -> str:
        return f"{self.num_hosts} hosts of {self.per_host} ranks"
