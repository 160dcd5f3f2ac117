"""Measures collectives and selection on all ranks, and fits a profile to the times."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import collectives
from horovod_sparse.arrays import Accumulator
from horovod_sparse.collectives import COLLECTIVES, Request, Synchronization
from horovod_sparse.feedback import Bucket, Recipe
from horovod_sparse.kernels import apply_scaled_sum
from horovod_sparse.planning.model import Fit, fit_time
from horovod_sparse.planning.profile import DENSE, Profile
from horovod_sparse.sparsifiers import BucketInfo, SparseSum, Sparsifier
from horovod_sparse.sparsifiers.dense import Dense
from horovod_sparse.topology import ClusterFacts
from horovod_sparse.training.parts import host_accumulator

#: number of sizes that are always measured: a line needs three
_FEWEST_SIZES = 3
#: a second density, so that time per element and time per selected element can be told apart
_DENSER = 4.0
#: steps in which thresholds settle
_WARMUP_STEPS = 3
#: least seconds, since fits need times above 0 and clocks may be coarse
_TINY_SECONDS = 1e-9
#: a sparsifier's time budget in those of a collective: it has two densities to measure, and own rounds
_SPARSIFIERS_SHARES = 2


@dataclass(frozen=True)
class Extent:
    """The sizes at which to measure (3 or more of each kind, ascending), repetitions, and a time budget."""

    #: bytes that a rank sends in a collective
    message_bytes: tuple[int, ...]
    #: sizes n of the buckets to select from
    bucket_elements: tuple[int, ...]
    #: repetitions of each size, after one to warm up
    repetitions: int
    #: divided among collectives and sparsifiers; if a share does not suffice, only 3 sizes are measured
    budget_seconds: float


#: for `measured_profile`; where the third message were short, a line through three would be noise
QUICK = Extent((64, 1 << 16, 1 << 20, 1 << 22), (1 << 12, 1 << 16, 1 << 20), 5, 2.0)
#: for `horovod-sparse calibrate`
THOROUGH = Extent(
    (64, 1024, 8192, 65536, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
    (1 << 10, 1 << 16, 1 << 22, 1 << 24),  # the first three are measured whatever time they take
    15,
    60.0,
)


@dataclass(frozen=True)
class Stopwatch:
    """Measures seconds on a rank, and shares their means or maxima over all ranks."""

    where: ClusterFacts
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    starting_seconds: Callable[[], float]
    repetitions: int
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def align_ranks(self, measured: Collection[type[Request]] = ()) -> Synchronization[None]:
        """Waits for all ranks, and for a random part of Horovod's cycle; called before each measurement."""
        if self.where.size > 1:
            if collectives.AllReduce not in measured:
                yield collectives.AllReduce(np.zeros(1, np.float32))
            elif collectives.Broadcast not in measured:
                yield collectives.Broadcast(np.zeros(1, np.int32), 0)
            else:
                yield collectives.AllGather(np.zeros(1, np.int32))
            self.sleep(float(self.generator.random()) * self.where.cycle_seconds)

    def reduce(self, seconds: Sequence[float], slowest: bool = False) -> Synchronization[NDArray[np.float64]]:
        """Returns the means (or maxima) over ranks of these seconds, equal on all ranks."""
        own = np.array(seconds, np.float64)
        if self.where.size == 1:
            return own
        gathered = yield collectives.AllGather(own.view(np.int32))
        everyone = np.array(gathered).view(np.float64).reshape(self.where.size, -1)
        return np.asarray(everyone.max(axis=0) if slowest else everyone.mean(axis=0))


def measure_repeatedly(
    once: Callable[[], Synchronization[Sequence[float]]],
    watch: Stopwatch,
    kinds: Collection[type[Request]],
    *,
    before: Callable[[], None] = lambda: None,
    skip: int = 1,
    slowest: bool = True,
) -> Synchronization[list[list[float]]]:
    """Runs `once` several times on all ranks; returns each run's seconds: the slowest rank's, or means."""
    own: list[float] = []
    for number in range(skip + watch.repetitions):
        before()
        yield from watch.align_ranks(kinds)
        seconds = yield from once()
        if number >= skip:
            own += seconds
    found: list[list[float]] = (yield from watch.reduce(own, slowest)).reshape(watch.repetitions, -1).tolist()
    return found


def measure_by_size(
    measured: Callable[[int], Synchronization[list[list[float]]]],
    watch: Stopwatch,
    sizes: Sequence[int],
    budget_seconds: float,
) -> Synchronization[tuple[list[float], list[list[float]]]]:
    """Calls `measured` for ascending sizes until the time is spent; returns each row's size, and the rows."""
    amounts: list[float] = []
    rows: list[list[float]] = []
    elapsed, left = 0.0, budget_seconds
    for number, size in enumerate(sizes):
        if number >= _FEWEST_SIZES and elapsed * size / sizes[number - 1] > left:
            break
        began = watch.clock()
        found = yield from measured(size)
        amounts += [float(size)] * len(found)
        rows += found
        (elapsed,) = yield from watch.reduce([watch.clock() - began])
        left -= elapsed
    return amounts, rows


class BucketMemory:
    """Makes the accumulators and gradients to be timed in host memory; a subclass makes them on a device."""

    def accumulator(self, info: BucketInfo, recipe: Recipe) -> Accumulator:
        """Returns a bucket's accumulator with a residual of zeros (for `Dense` one without a residual)."""
        return host_accumulator(info, recipe, whole=isinstance(recipe.sparsifier, Dense))

    def gradient(self, num_elements: int, dtype: str) -> Any:
        # bfloat16 is held as its bits
        return np.zeros(num_elements, "uint16" if dtype == "bfloat16" else dtype)

    def refill(self, gradient: Any) -> None:
        """Fills the gradient with the same values, as a backward pass would; called before every run."""
        generator, few = np.random.default_rng(1), min(gradient.size, 1 << 16)
        # a heavy tail, as gradients have
        drawn = generator.standard_normal(few, np.float32) * generator.standard_exponential(few, np.float32)
        drawn = np.resize(drawn, gradient.size)
        if gradient.dtype == np.uint16:
            gradient[...] = (drawn.view(np.uint32) >> 16).astype(np.uint16)
        else:
            np.copyto(gradient, drawn, casting="same_kind")

    def apply(self, gradient: Any, total: SparseSum, size: int) -> None:
        """Writes a sum's mean over ranks to the gradient, and returns when the device has done it."""
        apply_scaled_sum(gradient, None if total.whole else total.indices, total.values, 1.0 / size)


def bucket_times(
    sparsifier: Sparsifier,
    watch: Stopwatch,
    memory: BucketMemory,
    bucket_elements: Sequence[int],
    budget_seconds: float,
    dtype: str = "float32",
) -> Synchronization[tuple[list[float], list[list[float]]]]:
    """Measures the slowest rank's seconds of selection and decoding, for several sizes at two densities.

    All ranks run the sparsifier's rounds, so counts are those of a training. Returns sizes n, and rows of
    selected elements, received elements, seconds of selection and seconds of decoding.
    """
    dense = min(1.0, _DENSER * sparsifier.density)
    # at density 1 a lower one instead of a higher one
    densities = [sparsifier.density, dense if dense > sparsifier.density else sparsifier.density / _DENSER]
    rank, size = watch.where.rank, watch.where.size
    per_rank = size if sparsifier.density_scope == "per rank" else 1

    def measure_size(num_elements: int) -> Synchronization[list[list[float]]]:
        rows: list[list[float]] = []
        for density in densities if sparsifier.has_density else densities[:1]:
            chosen = replace(sparsifier, density=density, schedule=None)
            info, recipe = BucketInfo("calibration", num_elements, rank, size, dtype), Recipe(chosen)
            bucket = Bucket(info, recipe, memory.accumulator(info, recipe))
            gradient = memory.gradient(num_elements, dtype)
            once = functools.partial(_time_one_step, bucket, gradient, watch, memory)
            fill, kinds = functools.partial(memory.refill, gradient), set(chosen.rounds(size))
            found = yield from measure_repeatedly(once, watch, kinds, before=fill, skip=_WARMUP_STEPS)
            rows += [[density * num_elements, per_rank * density * num_elements, *row] for row in found]
        return rows

    return (yield from measure_by_size(measure_size, watch, bucket_elements, budget_seconds))


def _time_one_step(
    bucket: Bucket, gradient: Any, watch: Stopwatch, memory: BucketMemory
) -> Synchronization[Sequence[float]]:
    """Runs one step of a bucket; returns seconds of computation before its first collective and after."""
    step, seconds, answer, place = bucket.step(gradient), [_TINY_SECONDS, _TINY_SECONDS], None, 0
    while True:
        started = watch.clock()
        try:
            request = step.send(answer)
        except StopIteration as stop:
            memory.apply(gradient, stop.value, watch.where.size)
            seconds[1] += watch.clock() - started
            return seconds
        seconds[place] += watch.clock() - started
        answer = yield request
        seconds[place] += watch.starting_seconds()
        place = 1


def needed_kinds(sparsifiers: Sequence[Sparsifier], size: int) -> set[str]:
    """Returns the names of the collectives that these sparsifiers use among `size` ranks."""
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
) -> Synchronization[Profile]:
    """Measures collectives, selection and decoding on all ranks, and returns the same profile on each.

    All arguments but `where.rank` are equal on all ranks, and when to stop follows from numbers that all have
    gathered. Names of requests depend on their type alone, so Horovod's response cache is at work.
    """
    if kinds is None:
        kinds = sorted(needed_kinds(sparsifiers, where.size) | {"allreduce"})  # for dense parameters
    kinds = kinds if where.size > 1 else []
    share = extent.budget_seconds / max(1, len(kinds) + _SPARSIFIERS_SHARES * len(sparsifiers))
    watch = Stopwatch(where, clock, sleep, starting_seconds, extent.repetitions)
    found: dict[str, Fit] = {}
    for kind in kinds:
        make = functools.partial(_request_of_kind, kind, where.rank, where.size)
        timed = functools.partial(_time_collective, make, watch)
        amounts, rows = yield from measure_by_size(timed, watch, extent.message_bytes, share)
        found[kind] = fit_time(amounts, [each for (each,) in rows], what=kind)
    selection: dict[str, Fit] = {}
    decoding: dict[str, Fit] = {}
    memory = BucketMemory() if memory is None else memory
    for sparsifier in sparsifiers:
        budget, elements = _SPARSIFIERS_SHARES * share, extent.bucket_elements
        amounts, rows = yield from bucket_times(sparsifier, watch, memory, elements, budget, dtype)
        selected, received, *times = map(list, zip(*rows, strict=True))
        for fits, counts, took in zip((selection, decoding), (selected, received), times, strict=True):
            given = counts if sparsifier.has_density else None  # else n alone decides
            fits[sparsifier.name] = fit_time(amounts, took, given, what=f"work of {sparsifier.name}")
    if found.get("allreduce"):
        elements = extent.bucket_elements[:3]  # the smaller ones, as all of each is communicated
        amounts, rows = yield from bucket_times(Dense(), watch, memory, elements, math.inf, dtype)
        both = [selecting + decoded for *_, selecting, decoded in rows]
        selection[DENSE] = fit_time(amounts, both, what="work for dense parameters")
    facts = where.size, where.framework, where.controller, where.cycle_seconds
    return Profile(*facts, found, selection, decoding, device=where.device)


def _time_collective(
    make: Callable[[int], Request], watch: Stopwatch, num_bytes: int
) -> Synchronization[list[list[float]]]:
    request = make(num_bytes)

    def time_once() -> Synchronization[Sequence[float]]:
        started = watch.clock()
        yield request
        return (watch.clock() - started,)

    return (yield from measure_repeatedly(time_once, watch, {type(request)}, slowest=False))


def _request_of_kind(kind: str, rank: int, size: int, num_bytes: int) -> Request:
    """Returns a collective of this kind in which this rank sends `num_bytes`."""
    words = np.ones(max(1, -(-num_bytes // 4)), np.int32)
    part = words[: max(1, words.size // max(1, size - 1))]
    to_next, before = {(rank + 1) % size: words}, ((rank - 1) % size,)
    made: dict[str, Callable[[], Request]] = {
        "allgather": lambda: collectives.AllGather(words),
        "allreduce": lambda: collectives.AllReduce(words.astype(np.float32)),
        "broadcast": lambda: collectives.Broadcast(words, 0),
        "exchange": lambda: collectives.Exchange(to_next, before),
        "alltoall": lambda: collectives.AllToAll(
            tuple(words[:0] if peer == rank else part for peer in range(size))
        ),
    }
    return made[kind]()
