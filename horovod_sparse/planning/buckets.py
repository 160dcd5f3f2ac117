"""Timing all ranks together: a clock, sizes that a budget allows, and a rank's own work for a bucket."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import collectives
from horovod_sparse.arrays import Accumulator, HostAccumulator, WholeGradient
from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.feedback import Bucket, Recipe
from horovod_sparse.kernels import apply_scaled_sum
from horovod_sparse.sparsifiers import BucketInfo, SparseSum, Sparsifier
from horovod_sparse.sparsifiers.dense import Dense
from horovod_sparse.topology import ClusterFacts

#: sizes that are measured whatever time they take: fewer fix no line
_FEWEST_SIZES = 3
#: a second density, so that time per element and time per selected element can be told apart
_DENSER = 4.0
#: steps in which thresholds settle
_WARMUP_STEPS = 3
#: kept off 0, which no fit takes, where a clock is coarse
_TINY_SECONDS = 1e-9


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """A rank's clock, and means or maxima over all ranks of the seconds that it measured."""

    where: ClusterFacts
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    starting_seconds: Callable[[], float]
    repetitions: int
    generator: np.random.Generator = dataclasses.field(default_factory=lambda: np.random.default_rng(0))

    def meet(self, measured: Collection[type[Request]] = ()) -> Synchronization[None]:
        """Lets all ranks go on at about the same time, at a random point of Horovod's cycle."""
        if self.where.size > 1:
            if collectives.AllReduce not in measured:
                yield collectives.AllReduce(np.zeros(1, np.float32))
            elif collectives.Broadcast not in measured:
                yield collectives.Broadcast(np.zeros(1, np.int32), 0)
            else:
                yield collectives.AllGather(np.zeros(1, np.int32))
            self.sleep(float(self.generator.random()) * self.where.cycle_seconds)

    def shared(self, seconds: Sequence[float], slowest: bool = False) -> Synchronization[NDArray[np.float64]]:
        """Returns means (or maxima) of the seconds over ranks: [len(seconds)], the same on all."""
        own = np.array(seconds, np.float64)
        if self.where.size == 1:
            return own
        gathered = yield collectives.AllGather(own.view(np.int32))
        everyone = np.array(gathered).view(np.float64).reshape(self.where.size, -1)
        return np.asarray(everyone.max(axis=0) if slowest else everyone.mean(axis=0))


def repeated(
    once: Callable[[], Synchronization[Sequence[float]]],
    watch: Stopwatch,
    kinds: Collection[type[Request]],
    *,
    before: Callable[[], None] = lambda: None,
    skip: int = 1,
    slowest: bool = True,
) -> Synchronization[list[list[float]]]:
    """Repeats a coroutine that returns seconds, and returns a row for each repetition, equal on all ranks."""
    own: list[float] = []
    for number in range(skip + watch.repetitions):
        before()
        yield from watch.meet(kinds)
        seconds = yield from once()
        if number >= skip:
            own += seconds
    found: list[list[float]] = (yield from watch.shared(own, slowest)).reshape(watch.repetitions, -1).tolist()
    return found


def by_size(
    measured: Callable[[int], Synchronization[list[list[float]]]],
    watch: Stopwatch,
    sizes: Sequence[int],
    budget_seconds: float,
) -> Synchronization[tuple[list[float], list[list[float]]]]:
    """Measures at ascending sizes while the budget lasts, and returns the sizes and a row for each."""
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
        (elapsed,) = yield from watch.shared([watch.clock() - began])
        left -= elapsed
    return amounts, rows


class BucketMemory(Protocol):
    """The memory that holds the timed buckets: the host's, or a device's."""

    def accumulator(self, info: BucketInfo, recipe: Recipe) -> Accumulator:
        """Returns a bucket's accumulator with a residual of zeros; one without a residual for `Dense`."""

    def gradient(self, num_elements: int, dtype: str) -> Any:
        """Returns a flat gradient."""

    def refill(self, gradient: Any) -> None:
        """Writes the same gradient every time, as backward would; not timed, and done when it returns."""

    def apply(self, gradient: Any, total: SparseSum, size: int) -> None:
        """Scatters the mean over ranks into the gradient, which is zeros; done when it returns."""


class HostBucketMemory:
    """Buckets in the host's memory, as NumPy arrays; implements `BucketMemory`."""

    def accumulator(self, info: BucketInfo, recipe: Recipe) -> Accumulator:
        if isinstance(recipe.sparsifier, Dense):
            return WholeGradient(info.num_elements, info.dtype)
        density, companions = recipe.sparsifier.density, recipe.feedback.num_companions
        return HostAccumulator(info.num_elements, info.dtype, density=density, companions=companions)

    def gradient(self, num_elements: int, dtype: str) -> Any:
        # bfloat16 is held as its bits
        return np.zeros(num_elements, "uint16" if dtype == "bfloat16" else dtype)

    def refill(self, gradient: Any) -> None:
        generator, few = np.random.default_rng(1), min(gradient.size, 1 << 16)
        # a heavy tail, as gradients have
        drawn = generator.standard_normal(few, np.float32) * generator.standard_exponential(few, np.float32)
        drawn = np.resize(drawn, gradient.size)
        if gradient.dtype == np.uint16:
            gradient[...] = (drawn.view(np.uint32) >> 16).astype(np.uint16)
        else:
            np.copyto(gradient, drawn, casting="same_kind")

    def apply(self, gradient: Any, total: SparseSum, size: int) -> None:
        apply_scaled_sum(gradient, None if total.whole else total.indices, total.values, 1.0 / size)


def bucket_times(
    sparsifier: Sparsifier,
    watch: Stopwatch,
    memory: BucketMemory,
    bucket_elements: Sequence[int],
    budget_seconds: float,
    dtype: str = "float32",
) -> Synchronization[tuple[list[float], list[list[float]]]]:
    """Returns seconds of selection and decoding, at several sizes and two densities, on the slowest rank.

    The sparsifier's own rounds are carried out between all ranks, so counts are those of a training. Beside n
    each row has density * n, that by the ranks that select so many, and both times.
    """
    dense = min(1.0, _DENSER * sparsifier.density)
    # of one density, that which is asked for, and a lower one
    densities = [sparsifier.density, dense if dense > sparsifier.density else sparsifier.density / _DENSER]
    rank, size = watch.where.rank, watch.where.size
    per_rank = size if sparsifier.density_scope == "per rank" else 1

    def measured(num_elements: int) -> Synchronization[list[list[float]]]:
        rows: list[list[float]] = []
        for density in densities if sparsifier.has_density else densities[:1]:
            chosen = dataclasses.replace(sparsifier, density=density, schedule=None)
            info, recipe = BucketInfo("calibration", num_elements, rank, size, dtype), Recipe(chosen)
            bucket = Bucket(info, recipe, memory.accumulator(info, recipe))
            gradient = memory.gradient(num_elements, dtype)
            once = functools.partial(_one_step, bucket, gradient, watch, memory)
            fill, kinds = functools.partial(memory.refill, gradient), set(chosen.rounds(size))
            found = yield from repeated(once, watch, kinds, before=fill, skip=_WARMUP_STEPS)
            rows += [[density * num_elements, per_rank * density * num_elements, *row] for row in found]
        return rows

    return (yield from by_size(measured, watch, bucket_elements, budget_seconds))


def _one_step(
    bucket: Bucket, gradient: Any, watch: Stopwatch, memory: BucketMemory
) -> Synchronization[Sequence[float]]:
    """Returns the own seconds of one step of a bucket until its first request, and after that."""
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
