"""The front ends' common base of buckets, and how moves and sums over ranks reach parameters.

A residual belongs to its parameter: it is saved by the parameter's name, and kept when buckets change.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.arrays import (
    Accumulator,
    GradientParts,
    HostAccumulator,
    Indices,
    Values,
    WeightedParts,
    WholeGradient,
)
from horovod_sparse.collectives import Synchronization
from horovod_sparse.feedback import Bucket, Feedback, Progress, Recipe
from horovod_sparse.kernels.host import scatter, sparse_vectors
from horovod_sparse.plans import ParameterFacts
from horovod_sparse.sparsifiers import BucketInfo, SparseSum
from horovod_sparse.topology import RankAndSize, Topology
from horovod_sparse.training.engine import PartSpec

#: elements up to which dense parameters share one allreduce: a quarter of a MiB in float32
_GROUPED_ELEMENTS = 1 << 16


class Parameters:
    """A bucket's parameters, one after another; `spans` has each one's [start, stop).

    Here they are flat arrays of float32 or float64 on the host; front ends derive classes for other memory.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], arrays: Sequence[Any] = ()) -> None:
        self.spans, self._stops = list(spans), np.array([stop for _, stop in spans])
        self._memory = list(arrays)

    def arrays(self) -> list[Any]:
        """Returns flat views of the parameters' own memory."""
        return self._memory

    def after_write(self) -> None:
        """Called after the arrays have been changed; a subclass may copy them to the parameters."""

    def _by_parameter(self, indices: Indices) -> Iterator[tuple[Any, slice, Indices]]:
        """Yields (array, slice of `indices`, positions in the array) of each parameter that has indices."""
        cuts = itertools.pairwise([0, *np.searchsorted(indices, self._stops).tolist()])
        for array, (first, _), (start, stop) in zip(self.arrays(), self.spans, cuts, strict=True):
            if start < stop:
                yield array, slice(start, stop), indices[start:stop] - np.int32(first)

    def take(self, indices: Indices) -> list[Any]:
        """Returns the values at ascending, unique indices, in the parameters' own dtype."""
        return [scatter.taken_at(array, where) for array, _, where in self._by_parameter(indices)]

    def replace(
        self,
        old_values: Sequence[tuple[Indices, Any]] = (),
        decay: Mapping[float, Sequence[int]] | None = None,
        total: SparseSum | None = None,
        scale: float = 1.0,
        moves: Sequence[tuple[Indices, Values]] = (),
    ) -> tuple[int, list[Any]]:
        """Restores old values, multiplies by weight decay, subtracts a sum over ranks, then further moves.

        Indices in `old_values` and `moves` are ascending and unique; `decay` is {factor: parameter numbers}.
        Returns how many different indices the sum has, and the values at the indices of `moves` before each,
        which later calls take as `old_values`.
        """
        factor_of = {number: factor for factor, numbers in (decay or {}).items() for number in numbers}
        placed = [
            (array, start, factor_of.get(number, 1.0))
            for number, (array, (start, _)) in enumerate(zip(self.arrays(), self.spans, strict=True))
        ]
        if total is None or not total.whole:
            given = None if total is None else (total.indices, scaled(total, scale))
            replaced = sparse_vectors.replace_moves(placed, old_values, given, moves)
        else:
            sparse_vectors.replace_moves(placed, old_values)
            values, plain = scaled(total, scale), [(array, start, 1.0) for array, start, _ in placed]
            for (array, *_), span in zip(placed, self.spans, strict=True):
                array -= values[slice(*span)]
            replaced = len(values), sparse_vectors.replace_moves(plain, again=moves)[1]
        self.after_write()
        return replaced

    def to_save(self, before: Any, array: Callable[[np.ndarray], Any]) -> Any:
        """Returns the old parameter values of a move (`Move.before`) in the form that a checkpoint holds."""
        return array(before)

    def from_saved(self, saved: Any) -> Any:
        """Returns a move's old parameter values (`Move.before`) from what `to_save` returned."""
        return np.asarray(saved).copy()

    def fold_input(self, gradients: Sequence[Any], weights: tuple[float, float]) -> Any:
        """Returns ``weights[0] gradient + weights[1] parameter`` for a fold; zeros for a gradient of None."""
        return fold_parts(gradients, self.arrays(), weights)


def fold_parts(
    gradients: Sequence[np.ndarray | None], arrays: Sequence[np.ndarray], weights: tuple[float, float]
) -> GradientParts:
    """Returns ``weights[0] gradient + weights[1] array`` as parts to fold; zeros for a gradient of None."""
    own = [np.zeros_like(two) if one is None else two for one, two in zip(gradients, arrays, strict=True)]
    given = [array if one is None else one for one, array in zip(gradients, own, strict=True)]
    return GradientParts(given) if weights == (1.0, 0.0) else WeightedParts(given, own, weights)


def scaled(total: SparseSum, scale: float) -> Any:
    """Returns a sum's values times a factor (the same array if the factor is 1)."""
    return total.values if scale == 1.0 else total.values * float(scale)


class BucketPart:
    """A `Bucket`, sparse or dense, with its parameters' names and shapes: one of the parts of a training.

    A part with `dense`, which the plan leaves dense, has no sparsifier's state in a checkpoint. (A bucket
    that a rule of the recipe sends whole has one.) `spans` has each parameter's [start, stop).

    Args:
        memory: function that makes the bucket's accumulator.
        topology: which ranks share a host, if gradients are summed within hosts first; else None.
        **summing: see `TwoLevelBucket`.
    """

    def __init__(
        self,
        spec: PartSpec,
        shapes: Iterable[Sequence[int]],
        ranks: RankAndSize,
        dtype: str,
        *,
        memory: Callable[..., Accumulator] | None = None,
        topology: Topology | None = None,
        **summing: Any,
    ) -> None:
        self.name, self.names, self.dense, recipe = spec.label, tuple(spec.names), spec.dense, spec.recipe
        self.shapes, memory = [tuple(shape) for shape in shapes], memory or host_accumulator
        stops = np.cumsum([math.prod(shape) for shape in self.shapes]).tolist()
        self.spans: list[tuple[int, int]] = list(zip([0, *stops[:-1]], stops, strict=True))
        info = BucketInfo(spec.title, stops[-1], *ranks, dtype, spec.number)
        members = dict(zip(self.names, self.spans, strict=True))
        if topology is None:
            self.bucket = Bucket(info, recipe, memory(info, recipe, whole=spec.whole), members)
        else:
            from horovod_sparse.feedback.two_level_bucket import TwoLevelBucket, shard_of

            shard = memory(shard_of(info, topology), recipe)
            self.bucket = TwoLevelBucket(info, recipe, shard, members, topology, **summing)

    def zero_arrays(self) -> list[np.ndarray]:
        """Returns arrays of n zeros: one for the residual, and one for each companion."""
        count, info = 1 + self.bucket.recipe.feedback.num_companions, self.bucket.whole
        return [np.zeros(info.num_elements, info.value_dtype) for _ in range(count)]

    def restart(self, progress: Progress | None = None) -> None:
        """Sets residual and companions to 0, and resets the sparsifier's state to the step of `progress`."""
        self.bucket.load(self.zero_arrays())
        self.bucket.restart(progress)

    def abandon(self, *, drop: bool = False) -> None:
        """Rolls back the step: returns its selection to the residual; `drop` undoes its fold, too."""
        self.bucket.abandon(drop=drop)

    def shaped(self, number: int, values: np.ndarray) -> Any:
        """Returns a copy of `values`, the elements of parameter `number`, in its shape, as in checkpoints."""
        return np.array(values).reshape(self.shapes[number])

    def flat(self, number: int, values: Any) -> np.ndarray:
        """Returns a parameter's array, flat, in the bucket's order: the inverse of `shaped`."""
        return np.asarray(values).reshape(-1)

    def by_name(self, values: np.ndarray) -> dict[str, Any]:
        """Returns a copy of all n elements as a dict of arrays in the parameters' shapes."""
        named = enumerate(zip(self.names, self.spans, strict=True))
        return {name: self.shaped(number, values[slice(*span)]) for number, (name, span) in named}


def host_accumulator(info: BucketInfo, recipe: Recipe, *, whole: bool = False) -> Accumulator:
    """Returns a bucket's accumulator in host memory; `whole`: one for `Dense`, without a residual."""
    if whole:
        return WholeGradient(info.num_elements, info.dtype)
    density, companions = recipe.sparsifier.density, recipe.feedback.num_companions
    return HostAccumulator(info.num_elements, info.dtype, density=density, companions=companions)


def dense_groups(parameters: Sequence[ParameterFacts]) -> list[tuple[str, ...]]:
    """Returns groups of dense parameters to sum together: neighbours of one kind, up to a size.

    A collective for every bias would cost more time of the computing thread than of the network. A group is
    closed at a size, so that it is sent while backward goes on.

    Example:
        >>> dense_groups([ParameterFacts("b", 9), ParameterFacts("w", 80_000), ParameterFacts("a", 9)])
        [('b', 'w'), ('a',)]
    """
    groups: list[list[str]] = []
    kind, length = None, 0
    for one in parameters:
        if (one.dtype, one.device, one.group) != kind or length >= _GROUPED_ELEMENTS:
            groups.append([])
            kind, length = (one.dtype, one.device, one.group), 0
        groups[-1].append(one.name)
        length += one.num_elements
    return [tuple(group) for group in groups]


def residuals_by_parameter(parts: Sequence[BucketPart], num_companions: int) -> list[dict[str, Any]]:
    """Returns copies of the residuals, and of each companion, as dicts by parameter."""
    arrays: list[dict[str, Any]] = [{} for _ in range(1 + num_companions)]
    for part in parts:
        for by_name, values in zip(arrays, part.bucket.whole_arrays(), strict=False):
            by_name |= part.by_name(values)
    return arrays


def assign_residuals(
    parts: Sequence[BucketPart], arrays: Sequence[Mapping[str, Any]], progress: Mapping[str, Progress]
) -> None:
    """Copies residuals and companions into parts, and resets their sparsifiers' states."""
    for part in parts:
        part.restart(progress_of(part.names, progress))
        if any(name in by_name for by_name in arrays for name in part.names):
            part.bucket.load(_arrays_of_part(part, arrays, progress))


def gather_shards(
    parts: Sequence[BucketPart], arrays: Sequence[Mapping[str, Any]], progress: Mapping[str, Progress]
) -> Synchronization[None]:
    """Sends each rank of a host the residuals of its shard that other ranks of the host hold."""
    for part in parts:
        yield from part.bucket.load_host_sum(_arrays_of_part(part, arrays, progress))


def _arrays_of_part(
    part: BucketPart, arrays: Sequence[Mapping[str, Any]], progress: Mapping[str, Progress]
) -> list[np.ndarray]:
    """Returns a part's residual and companions, [n] each, from dicts; scales moments to the part's age."""
    filled = part.zero_arrays()
    for by_name, into in zip(arrays, filled, strict=False):
        for number, (name, span) in enumerate(zip(part.names, part.spans, strict=True)):
            if name in by_name:
                into[slice(*span)] = part.flat(number, by_name[name])
                if by_name is not arrays[0] and name in progress:
                    before, bucket = progress[name], part.bucket
                    age = before.age if before.summed == bucket.num_summed else 0
                    into[slice(*span)] *= bucket.feedback.moment_factor(age, bucket.progress.age)
    return filled


def rescaled(arrays: Sequence[Mapping[str, Any]], factor: float, feedback: Feedback) -> list[dict[str, Any]]:
    """Returns residuals, and companions that add up, times a factor: for another number of ranks."""
    return [
        {name: values * factor for name, values in by_name.items()}
        if factor != 1.0 and (number == 0 or feedback.adds_up)
        else dict(by_name)
        for number, by_name in enumerate(arrays)
    ]


def progress_of(names: Iterable[str], known: Mapping[str, Progress]) -> Progress:
    """Returns a new bucket's progress, from that of its parameters in earlier buckets.

    Schedules continue from the largest step number.
    """
    found = [known[name] for name in names if name in known]
    step = max((one.step for one in found or known.values()), default=0)
    age = min((one.age for one in found), default=0)  # a higher age would spoil the bias correction
    return dataclasses.replace(found[0] if found else Progress(), step=step, since=step - age)


def progress_after_agreement(own: Progress, step: int) -> Progress:
    """Returns a bucket's progress after an agreement: at the step from which all ranks continue.

    Companions hold this rank's gradients, and keep their age: those of a new worker have age 0.

    Example:
        >>> [progress_after_agreement(own, 7).age for own in (Progress(), Progress(5))]
        [0, 5]
    """
    return dataclasses.replace(own, step=step, since=step - own.age, leans=(0.0, 0.0))
