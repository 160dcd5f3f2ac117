"""Whether gradients are summed within hosts first, and which ranks share one: what all front ends do alike.

A rank assumes what Horovod tells it when buckets are made, so that nothing waits for other ranks then; in the
first synchronization after every start of Horovod all ranks tell each other, and buckets follow where that
differs. What a rank held of others' shards (of a checkpoint with one level, say) goes to them then.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from horovod_sparse.checks import whole_number
from horovod_sparse.collectives import ReduceScatter, Synchronization, shared_lines
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import TwoLevelBucket
from horovod_sparse.topology import Topology


class ChosenLevels(Protocol):
    """Levels, and why: what `horovod_sparse.planning` has to say."""

    @property
    def levels(self) -> str: ...
    @property
    def reason(self) -> str: ...


#: which levels are faster, by numbers of hosts and of ranks on each; the same on all ranks
Choose: TypeAlias = Callable[[int, int], ChosenLevels]

#: as if so many ranks, one behind the other, had a host of their own: for tests, and for hosts in which the
#: fast network joins some of the ranks only
RANKS_VARIABLE = "HOROVOD_SPARSE_RANKS_PER_HOST"

_log = logging.getLogger("horovod_sparse")


@dataclass(frozen=True)
class Ranks:
    """Where one rank stands: among those that synchronize, among all that were launched, and on its host.

    What a host is called is the same on all of its ranks.
    """

    rank: int
    size: int
    world_rank: int
    world_size: int
    host: str
    host_rank: int
    host_size: int

    @classmethod
    def of_horovod(cls, hvd: Any, process_set: Any) -> Ranks:
        """As a binding of Horovod tells, which has been started."""
        # where hosts are of different sizes, a cross rank counts those that have a rank at this place only
        host = hvd.cross_rank() if _are_alike(hvd) else os.environ.get("HOROVOD_HOSTNAME") or platform.node()
        own = int(process_set.rank()), int(process_set.size()), int(hvd.rank()), int(hvd.size())
        return cls(*own, str(host), int(hvd.local_rank()), int(hvd.local_size()))


def own_place(ranks: Ranks) -> tuple[str, int]:
    """This rank's host, and its place on it."""
    asked = os.environ.get(RANKS_VARIABLE, "").strip()
    if not asked:
        return f"host {ranks.host}", ranks.host_rank
    per_host = whole_number(asked)
    if per_host < 1:
        raise ArgumentError(RANKS_VARIABLE, asked, "a number of ranks, from 1")
    host, local = divmod(ranks.world_rank, per_host)
    return f"host {host}", local


def _are_alike(hvd: Any) -> bool:
    """Whether all hosts have as many ranks; the same on all ranks."""
    asked = getattr(hvd, "is_homogeneous", None) or getattr(hvd.mpi_ops, "is_homogeneous", None)
    return asked is None or bool(asked())


def assumed_topology(levels: str, ranks: Callable[[], Ranks], choose: Choose) -> Topology | None:
    """Which ranks share a host, as far as a rank can tell alone; None for one level."""
    if levels == "flat":
        return None
    here = ranks()
    if here.size == 1 or here.size != here.world_size:
        return None
    host, local = own_place(here)
    per_host = int(os.environ.get(RANKS_VARIABLE, "").strip() or here.host_size)
    if per_host < 1 or here.size % per_host or host != f"host {here.world_rank // per_host}":
        return None
    if local != here.world_rank % per_host:
        return None
    return _wanted(levels, Topology.regular(here.size // per_host, per_host), choose)[0]


def agreed_topology(levels: str, place: tuple[str, int], choose: Choose) -> Synchronization[Topology | None]:
    """Which ranks share a host, as all tell by `own_place`; None for one level. One collective, or none."""
    if levels == "flat":
        return None
    places = [(host, local) for host, local in (yield from shared_lines(place))]
    counts: dict[str, int] = {}
    for host, _ in places:
        counts[host] = counts.get(host, 0) + 1
    if levels == "auto" and len(set(counts.values())) > 1:
        _say("flat", f"hosts have different numbers of ranks ({sorted(counts.values())})")
        return None
    topology, why = _wanted(levels, Topology.of(places), choose)
    if topology is not None:
        _say("host", f"gradients are summed within hosts first ({why})")
    else:
        _say("flat", why)
    return topology


_said: set[str] = set()


def _say(levels: str, why: str) -> None:
    words = f"levels={levels!r}: {why}"
    if words not in _said:
        _said.add(words)
        _log.info("%s", words)


def _wanted(levels: str, topology: Topology, choose: Choose) -> tuple[Topology | None, str]:
    """What is asked for, or is faster, and why."""
    if levels == "host":
        return topology, str(topology)
    if topology.num_hosts == 1:
        return None, "there is one host"
    choice = choose(topology.num_hosts, topology.per_host)
    return (topology if choice.levels == "host" else None), choice.reason


def hold_elsewhere(parts: Sequence[Any]) -> bool:
    """Whether a rank holds something of others' shards; see `gathered_shards`."""
    return any(
        bucket.elsewhere is not None
        for bucket in (getattr(part, "bucket", None) for part in parts)
        if isinstance(bucket, TwoLevelBucket)
    )


def gathered_shards(parts: Sequence[Any]) -> Synchronization[None]:
    """Brings what ranks hold of each other's shards to whose they are; all ranks together."""
    for part in parts:
        bucket = getattr(part, "bucket", None)
        if not isinstance(bucket, TwoLevelBucket):
            continue
        shards = []
        for values in part.held():
            shard = yield ReduceScatter(np.ascontiguousarray(values), level="host")
            shards.append(bucket.filled(shard))
        bucket.elsewhere = None
        bucket.accumulator.assign_held(shards)
