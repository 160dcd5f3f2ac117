"""Timing a rank's own work for a bucket: selection, and decoding of the sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from horovod_sparse.arrays import Accumulator, HostAccumulator, WholeGradient
from horovod_sparse.collectives import Synchronization
from horovod_sparse.feedback import Bucket, Recipe
from horovod_sparse.kernels import apply_scaled_sum
from horovod_sparse.planning.calibration.collectives import Stopwatch, by_size, repeated
from horovod_sparse.sparsifiers import BucketInfo, SparseSum, Sparsifier
from horovod_sparse.sparsifiers.dense import Dense

#: a second density, so that time per element and time per selected element can be told apart
_DENSER = 4.0
#: steps in which thresholds settle
_WARMUP_STEPS = 3
#: kept off 0, which no fit takes, where a clock is coarse
_TINY_SECONDS = 1e-9


class BucketMemory(Protocol):
    """The memory that holds the timed buckets: the host's, or a device's."""

    def accumulator(self, info: BucketInfo, recipe: Recipe) -> Accumulator:
        """Returns a bucket's accumulator with a residual of zeros; one without a residual for `Dense`."""

    def gradient(self, num_elements: int, dtype: str) -> Any:
        """A flat gradient."""

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
        if gradient.dtype == np.uint16:
            gradient[...] = (_drawn(gradient.size).view(np.uint32) >> 16).astype(np.uint16)
        else:
            np.copyto(gradient, _drawn(gradient.size), casting="same_kind")

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
    """Seconds of selection and decoding, at several sizes and two densities: those of the slowest rank.

    The sparsifier's own rounds are carried out between all ranks, so counts are those of a training. Beside n
    each row has density * n, that by the ranks that select so many, and both times.
    """
    dense = min(1.0, _DENSER * sparsifier.density)
    # of one density, that which is asked for, and a lower one
    densities = [sparsifier.density, dense if dense > sparsifier.density else sparsifier.density / _DENSER]
    if not sparsifier.has_density:
        del densities[1:]
    per_rank = watch.size if sparsifier.density_scope == "per rank" else 1

    def at(density: float, num_elements: int, often: int) -> Synchronization[list[list[float]]]:
        chosen = dataclasses.replace(sparsifier, density=density, schedule=None)
        info, recipe = BucketInfo("calibration", num_elements, watch.rank, watch.size, dtype), Recipe(chosen)
        bucket = Bucket(info, recipe, memory.accumulator(info, recipe))
        gradient = memory.gradient(num_elements, dtype)
        rows = yield from repeated(
            lambda: _one_step(bucket, gradient, watch, memory),
            watch,
            often,
            set(chosen.rounds(watch.size)),
            before=lambda: memory.refill(gradient),
            skip=_WARMUP_STEPS,
        )
        return [[density * num_elements, per_rank * density * num_elements, *row] for row in rows]

    def measured(num_elements: int, often: int) -> Synchronization[list[list[float]]]:
        rows: list[list[float]] = []
        for density in densities:
            rows += yield from at(density, num_elements, often)
        return rows

    return (yield from by_size(measured, watch, bucket_elements, budget_seconds))


def _one_step(
    bucket: Bucket, gradient: Any, watch: Stopwatch, memory: BucketMemory
) -> Synchronization[tuple[float, float]]:
    """Times one step of a bucket: seconds until its first request, and own seconds after that."""
    total, selection, decoding = yield from _parts(bucket.step(gradient), watch)
    started = watch.clock()
    memory.apply(gradient, total, watch.size)
    return selection, decoding + watch.clock() - started


def _parts(step: Synchronization[Any], watch: Stopwatch) -> Synchronization[tuple[Any, float, float]]:
    """Runs a coroutine and returns its result, and its own seconds before and after its first request."""
    seconds, answer, place = [_TINY_SECONDS, _TINY_SECONDS], None, 0
    while True:
        started = watch.clock()
        try:
            request = step.send(answer)
        except StopIteration as stop:
            seconds[1] += watch.clock() - started
            return (stop.value, *seconds)
        seconds[place] += watch.clock() - started
        answer = yield request
        seconds[place] += watch.starting_seconds()
        place = 1


def _drawn(num_elements: int) -> np.ndarray:
    """Returns the same heavy-tailed numbers on every call, as gradients have."""
    generator = np.random.default_rng(1)
    few = min(num_elements, 1 << 16)
    drawn = generator.standard_normal(few, np.float32) * generator.standard_exponential(few, np.float32)
    return np.resize(drawn, num_elements)
