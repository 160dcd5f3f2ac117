"""Measuring a cluster through whatever carries out requests: from samples to a profile."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from horovod_sparse import collectives
from horovod_sparse.collectives import COLLECTIVES, Level, Request, Synchronization
from horovod_sparse.errors import UnknownNameError
from horovod_sparse.planning.buckets import (
    BucketMemory,
    HostBucketMemory,
    Stopwatch,
    bucket_times,
    by_size,
    repeated,
)
from horovod_sparse.planning.cost_model import Fit, fit_time
from horovod_sparse.planning.profile import DENSE, Profile
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.sparsifiers.dense import Dense
from horovod_sparse.topology import ClusterFacts, Topology

#: of the time that a collective gets: a sparsifier is measured at two densities, and has rounds of its own
_SPARSIFIERS_SHARES = 2


@dataclass(frozen=True)
class Extent:
    """How much is measured: 3 or more sizes of each kind, ascending."""

    #: that a rank puts into a collective
    message_bytes: tuple[int, ...]
    #: n of the buckets that are selected from
    bucket_elements: tuple[int, ...]
    #: of each size, beside one to warm up
    repetitions: int
    #: in shares for every collective and sparsifier; one that does not suffice leaves out all but 3 sizes
    budget_seconds: float


#: during a training's warm-up; where the third message were short, a line through three would be noise
QUICK = Extent((64, 1 << 16, 1 << 20, 1 << 22), (1 << 12, 1 << 16, 1 << 20), 5, 2.0)
#: for `horovod-sparse calibrate`
THOROUGH = Extent(
    (64, 1024, 8192, 65536, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
    (1 << 10, 1 << 16, 1 << 22, 1 << 24),  # the first three are measured whatever time they take
    15,
    60.0,
)


def needed_kinds(sparsifiers: Sequence[Sparsifier], size: int) -> set[str]:
    """Returns the kinds of collective that these sparsifiers use among `size` ranks."""
    return {COLLECTIVES[kind] for sparsifier in sparsifiers for kind in sparsifier.rounds(size)}


def calibration(
    where: ClusterFacts,
    sparsifiers: Sequence[Sparsifier],
    *,
    extent: Extent = THOROUGH,
    kinds: Sequence[str] | None = None,
    memory: BucketMemory | None = None,
    dtype: str = "float32",
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    starting_seconds: Callable[[], float] = lambda: 0.0,
    topology: Topology | None = None,
) -> Synchronization[Profile]:
    """Measures collectives, selection and decoding; a coroutine that all ranks run with the same arguments.

    But for `where.rank`. When to stop is decided from numbers that all have gathered, and all end with the
    same profile. Names of requests depend on their type alone, so Horovod's response cache is at work.
    """
    if kinds is None:
        kinds = sorted(needed_kinds(sparsifiers, where.size) | {"allreduce"})  # for dense parameters
    wanted: list[tuple[Level, str]] = [("all", kind) for kind in kinds] if where.size > 1 else []
    if topology is not None and topology.per_host > 1:
        wanted += [("host", "reducescatter"), ("host", "allgather")]
        if topology.num_hosts > 1:
            wanted += [("across", kind) for kind in sorted(needed_kinds(sparsifiers, topology.num_hosts))]
    share = extent.budget_seconds / max(1, len(wanted) + _SPARSIFIERS_SHARES * len(sparsifiers))
    watch = Stopwatch(where, clock, sleep, starting_seconds, extent.repetitions)
    found: dict[str, dict[str, Fit]] = {"all": {}, "host": {}, "across": {}}
    for level, kind in wanted:
        sizes = extent.message_bytes
        if kind == "reducescatter":  # a host sums buckets, and not what is selected
            sizes = tuple(4 * num_elements for num_elements in extent.bucket_elements)
        group = range(where.size) if topology is None else topology.group(level, where.rank)
        make = functools.partial(_request, kind, level, group.index(where.rank), len(group))
        amounts, rows = yield from by_size(functools.partial(_timed, make, watch), watch, sizes, share)
        found[level][kind] = fit_time(amounts, [each for (each,) in rows], what=f"{kind} of level {level}")
    selection: dict[str, Fit] = {}
    decoding: dict[str, Fit] = {}
    memory = HostBucketMemory() if memory is None else memory
    for sparsifier in sparsifiers:
        budget, elements = _SPARSIFIERS_SHARES * share, extent.bucket_elements
        amounts, rows = yield from bucket_times(sparsifier, watch, memory, elements, budget, dtype)
        selected, received, *times = map(list, zip(*rows, strict=True))
        for fits, counts, took in zip((selection, decoding), (selected, received), times, strict=True):
            given = counts if sparsifier.has_density else None  # else n alone decides
            fits[sparsifier.name] = fit_time(amounts, took, given, what=f"work of {sparsifier.name}")
    if found["all"].get("allreduce"):
        elements = extent.bucket_elements[:3]  # the smaller ones, as all of each is communicated
        amounts, rows = yield from bucket_times(Dense(), watch, memory, elements, math.inf, dtype)
        both = [selecting + decoded for *_, selecting, decoded in rows]
        selection[DENSE] = fit_time(amounts, both, what="work for dense parameters")
    everywhere, levels = found.pop("all"), found if found["host"] else {}
    per_host = topology.per_host if topology is not None and levels else 1
    facts = where.size, where.framework, where.controller, where.cycle_seconds
    return Profile(
        *facts, everywhere, selection, decoding, device=where.device, per_host=per_host, levels=levels
    )


def _timed(
    make: Callable[[int], Request], watch: Stopwatch, num_bytes: int
) -> Synchronization[list[list[float]]]:
    request = make(num_bytes)

    def once() -> Synchronization[Sequence[float]]:
        started = watch.clock()
        yield request
        return (watch.clock() - started,)

    return (yield from repeated(once, watch, {type(request)}, slowest=False))


def _request(kind: str, level: Level, rank: int, size: int, num_bytes: int) -> Request:
    """Returns a collective into which a rank puts `num_bytes`."""
    words = np.ones(max(1, -(-num_bytes // 4)), np.int32)
    part = words[: max(1, words.size // max(1, size - 1))]
    to_next, before = {(rank + 1) % size: words}, ((rank - 1) % size,)
    made: dict[str, Callable[[], Request]] = {
        "allgather": lambda: collectives.AllGather(words, level),
        "allreduce": lambda: collectives.AllReduce(words.astype(np.float32), level),
        "reducescatter": lambda: collectives.ReduceScatter(words.astype(np.float32), level),
        "broadcast": lambda: collectives.Broadcast(words, 0, level),
        "exchange": lambda: collectives.Exchange(to_next, before, level),
        "alltoall": lambda: collectives.AllToAll(
            tuple(words[:0] if peer == rank else part for peer in range(size)), level
        ),
    }
    if kind not in made:
        raise UnknownNameError("collective", kind, made)
    return made[kind]()
