"""Measuring a cluster through whatever carries out requests: from samples to a profile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horovod_sparse.collectives import Level, Synchronization
from horovod_sparse.planning.calibration.buckets import BucketMemory, HostBucketMemory, bucket_times
from horovod_sparse.planning.calibration.collectives import Stopwatch, collective_times
from horovod_sparse.planning.cost_model import Fit, fit_time
from horovod_sparse.planning.profile import DENSE, Profile
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.plans.network import COLLECTIVES
from horovod_sparse.sparsifiers import Sparsifier
from horovod_sparse.sparsifiers.dense import Dense
from horovod_sparse.topology import Topology

#: sizes at which the work for dense parameters is timed: the smaller ones, as all of each is communicated
_DENSE_SIZES = 3
#: of the time that a collective gets: a sparsifier is measured at two densities, and has rounds of its own
_SPARSIFIERS_SHARES = 2


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    #: that a rank puts into a collective, ascending; 3 or more sizes
    message_bytes: tuple[int, ...]
    #: n of the buckets that are selected from, ascending; 3 or more sizes
    bucket_elements: tuple[int, ...]
    #: of each size, beside one to warm up
    repetitions: int
    #: for all, in shares for every collective and sparsifier; a share that does not suffice measures larger
    #: sizes less often, and then leaves them out, but never the first 3
    budget_seconds: float
    #: of gradients that a host sums, ascending: of buckets, not of what is selected
    summed_bytes: tuple[int, ...] = (1 << 12, 1 << 20, 1 << 24)


#: during a training's warm-up; where the third message were short, a line through three would be noise
QUICK = Extent((64, 1 << 16, 1 << 20, 1 << 22), (1 << 12, 1 << 16, 1 << 20), 5, 2.0)
#: for `horovod-sparse calibrate`
THOROUGH = Extent(
    (64, 1024, 8192, 65536, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
    (1 << 10, 1 << 16, 1 << 22, 1 << 24),  # the first three are measured whatever time they take
    15,
    60.0,
    (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24),
)


def needed_kinds(sparsifiers: Sequence[Sparsifier], size: int) -> tuple[str, ...]:
    """Returns the kinds of collective that these sparsifiers use, and allreduce for dense parameters."""
    kinds = {COLLECTIVES[kind] for sparsifier in sparsifiers for kind in sparsifier.rounds(size)}
    return tuple(sorted(kinds | {"allreduce"}))


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
    kinds = needed_kinds(sparsifiers, where.size) if kinds is None else tuple(kinds)
    if where.size == 1:
        kinds = ()
    memory = HostBucketMemory() if memory is None else memory
    of_levels = _kinds_of_levels(sparsifiers, topology)
    shares = len(kinds) + len(of_levels) + _SPARSIFIERS_SHARES * len(sparsifiers)
    share = extent.budget_seconds / max(1, shares)
    cycle = where.cycle_seconds
    watch = Stopwatch(where.rank, where.size, clock, sleep, cycle, starting_seconds, extent.repetitions)
    collectives: dict[str, Fit] = {}
    for kind in kinds:
        amounts, seconds = yield from collective_times(kind, watch, extent.message_bytes, share)
        collectives[kind] = fit_time(amounts, seconds, what=kind)
    levels: dict[str, dict[str, Fit]] = {"host": {}, "across": {}} if of_levels else {}
    for level, kind in of_levels:
        group = topology.group(level, where.rank) if topology is not None else ()
        place = group.index(where.rank), len(group)
        sizes = extent.summed_bytes if kind == "reducescatter" else extent.message_bytes
        amounts, seconds = yield from collective_times(kind, watch, sizes, share, level, place)
        levels[level][kind] = fit_time(amounts, seconds, what=f"{kind} of level {level}")
    selection: dict[str, Fit] = {}
    decoding: dict[str, Fit] = {}
    for sparsifier in sparsifiers:
        found_at, rows = yield from bucket_times(
            sparsifier, watch, memory, extent.bucket_elements, _SPARSIFIERS_SHARES * share, dtype
        )
        selected, received, selecting, decoded = map(list, zip(*rows, strict=True))
        for fits, count, took, what in (
            (selection, selected, selecting, f"selection of {sparsifier.name}"),
            (decoding, received, decoded, f"decoding of {sparsifier.name}"),
        ):
            counts = count if sparsifier.has_density else None  # else n alone decides
            fits[sparsifier.name] = fit_time(found_at, took, counts, what=what)
    if "allreduce" in kinds:
        # what stays dense is worked for, too: under the name that `Profile.cost` looks for
        elements = extent.bucket_elements[:_DENSE_SIZES]
        amounts, rows = yield from bucket_times(Dense(), watch, memory, elements, math.inf, dtype)
        both = [selecting + decoded for *_, selecting, decoded in rows]
        selection[DENSE] = fit_time(amounts, both, what="work for dense parameters")
    return Profile(
        where.size,
        where.framework,
        where.controller,
        where.cycle_seconds,
        collectives,
        selection,
        decoding,
        device=where.device,
        per_host=topology.per_host if topology is not None and levels else 1,
        levels=levels,
    )


def _kinds_of_levels(sparsifiers: Sequence[Sparsifier], topology: Topology | None) -> list[tuple[Level, str]]:
    """Returns the collectives of two levels: sum and shards within hosts, the sparsifiers' between hosts."""
    if topology is None or topology.per_host == 1:
        return []
    inside: list[tuple[Level, str]] = [("host", "reducescatter"), ("host", "allgather")]
    if topology.num_hosts == 1:
        return inside
    between = sorted(
        {COLLECTIVES[kind] for sparsifier in sparsifiers for kind in sparsifier.rounds(topology.num_hosts)}
    )
    return [*inside, *(("across", kind) for kind in between)]
