"""Whether gradients are summed within hosts first, and which ranks share one: what all front ends do alike.

A rank assumes what Horovod tells it when buckets are made, so that nothing waits for other ranks then; in the
first synchronization after every start of Horovod all ranks tell each other, and buckets follow where that
differs. What a rank held of others' shards (of a checkpoint with one level, say) goes to them then.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from horovod_sparse.checks import whole_number
from horovod_sparse.collectives import ReduceScatter, Synchronization
from horovod_sparse.cost import LevelChoice, choose_levels
from horovod_sparse.errors import ArgumentError, ProfileMismatchError, UnknownNameError
from horovod_sparse.feedback import HostBucket
from horovod_sparse.frontend.agreement import shared_lines
from horovod_sparse.frontend.decision import levels_by_plan
from horovod_sparse.frontend.plan_request import PlanRequest
from horovod_sparse.frontend.shared_memory import may_share
from horovod_sparse.merging import ParameterFacts
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.topology import Topology

#: "flat": one level; "host": two; "auto": two where there are several hosts of several ranks each, as many on
#: all of them, and the cost model says that they are faster
LEVELS = ("flat", "host", "auto")

#: which levels are faster, by numbers of hosts and of ranks on each; the same on all ranks
Choose: TypeAlias = Callable[[int, int], LevelChoice]

#: as if so many ranks, one behind the other, had a host of their own: for tests, and for hosts in which the
#: fast network joins some of the ranks only
RANKS_VARIABLE = "HOROVOD_SPARSE_RANKS_PER_HOST"

_log = logging.getLogger("horovod_sparse")


def check_levels(levels: str) -> None:
    """Refuses what is no way to use levels.

    Raises:
        UnknownNameError: saying which there are.
        ArgumentError: if the environment says of memory what cannot be.
    """
    if levels not in LEVELS:
        raise UnknownNameError("levels", str(levels), LEVELS)
    may_share()


def by_cost(
    sparsifier: Sparsifier, parameters: Iterable[ParameterFacts], request: PlanRequest | None
) -> Choose:
    """What chooses by the cost model: with the profile that was given, or by formulas.

    Where plans are made by that profile, by iterations under them; else by all of the model as one bucket.

    Args:
        sparsifier: of the buckets.
        parameters: of the model.
        request: how plans are made; None where times decide nothing.
    """
    profile, parameters = None if request is None else request.profile, list(parameters)
    n = max(1, sum(parameter.num_elements for parameter in parameters))

    def choose(num_hosts: int, per_host: int) -> LevelChoice:
        try:
            if request is not None and profile is not None and request.measures and request.complete:
                return levels_by_plan(request, profile, parameters, sparsifier, num_hosts, per_host)
            return choose_levels(sparsifier, n, num_hosts, per_host, profile=profile)
        except ProfileMismatchError as error:
            return LevelChoice("flat", f"the profile cannot tell ({error})")

    return choose


def own_place(hvd: Any) -> tuple[str, int]:
    """This rank's host, and its place on it.

    Args:
        hvd: Horovod's binding for a framework, started.

    Raises:
        ArgumentError: if the environment asks for what cannot be.
    """
    asked = os.environ.get(RANKS_VARIABLE, "").strip()
    if not asked:
        # where hosts are of different sizes, a cross rank counts those that have a rank at this place only
        name = hvd.cross_rank() if _are_alike(hvd) else os.environ.get("HOROVOD_HOSTNAME") or platform.node()
        return f"host {name}", int(hvd.local_rank())
    per_host = whole_number(asked)
    if per_host < 1:
        raise ArgumentError(RANKS_VARIABLE, asked, "a number of ranks, from 1")
    host, local = divmod(int(hvd.rank()), per_host)
    return f"host {host}", local


def _are_alike(hvd: Any) -> bool:
    """Whether all hosts have as many ranks; the same on all ranks."""
    asked = getattr(hvd, "is_homogeneous", None) or getattr(hvd.mpi_ops, "is_homogeneous", None)
    return asked is None or bool(asked())


def assumed_topology(levels: str, hvd: Any, process_set: Any, choose: Choose) -> Topology | None:
    """Which ranks share a host, as far as a rank can tell alone; None for one level.

    Args:
        levels: as the user asked.
        hvd: see `own_place`.
        process_set: the ranks that synchronize.
        choose: for "auto".
    """
    if levels == "flat":  # before Horovod, or another engine, is started
        return None
    size = process_set.size()
    if size in (None, 1) or size != hvd.size():
        return None
    host, local = own_place(hvd)
    per_host = int(os.environ.get(RANKS_VARIABLE, "").strip() or hvd.local_size())
    if per_host < 1 or size % per_host or host != f"host {hvd.rank() // per_host}":
        return None
    if local != hvd.rank() % per_host:
        return None
    return _wanted(levels, Topology.regular(size // per_host, per_host), choose)[0]


def agreed_topology(levels: str, place: tuple[str, int], choose: Choose) -> Synchronization[Topology | None]:
    """Which ranks share a host, as all have told; None for one level. One collective, or none.

    Args:
        levels: as the user asked, the same on all ranks.
        place: of this rank, by `own_place`.
        choose: for "auto".

    Raises:
        UnsupportedError: on every rank alike, if two levels are asked for, and hosts have different numbers
            of ranks.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> from horovod_sparse.cost import LevelChoice
        >>> choose = lambda hosts, each: LevelChoice("host", "")
        >>> ranks = [agreed_topology("host", (host, local), choose) for host in "ab" for local in (0, 1)]
        >>> print(run_lockstep(ranks)[0])
        2 hosts of 2 ranks
    """
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
        if isinstance(bucket, HostBucket)
    )


def gathered_shards(parts: Sequence[Any]) -> Synchronization[None]:
    """Brings what ranks hold of each other's shards to whose they are; all ranks together.

    Args:
        parts: of one training, the same on all ranks.
    """
    for part in parts:
        bucket = getattr(part, "bucket", None)
        if not isinstance(bucket, HostBucket):
            continue
        shards = []
        for values in part.held():
            shard = yield ReduceScatter(np.ascontiguousarray(values), level="host")
            shards.append(bucket.filled(shard))
        bucket.elsewhere = None
        part.assign_own(shards)
