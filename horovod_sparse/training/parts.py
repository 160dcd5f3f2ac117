"""What is synchronized as one, a bucket or parameters that stay dense: what all front ends see alike.

What parts hold back belongs to parameters: by their names it is saved, and survives other buckets.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from horovod_sparse.collectives import AllReduce, Synchronization
from horovod_sparse.errors import EditedGradientError, NonFiniteGradientError, NonFiniteSumError
from horovod_sparse.feedback import Bucket, Feedback, Progress, Recipe
from horovod_sparse.plans.plan import ParameterFacts
from horovod_sparse.sparsifiers.base import accumulator_dtype
from horovod_sparse.telemetry import BucketReport, BucketStep
from horovod_sparse.training.encoding import from_plain

#: parameters that are summed together: the name of each, and where it stops
Members: TypeAlias = Sequence[tuple[str, int]]

#: dense parameters are sent together until there are so many elements: a quarter of a MiB in float32
_GROUPED_ELEMENTS = 1 << 16


class Part(Protocol):
    """Parameters that are synchronized together."""

    #: of the parameters
    names: tuple[str, ...]
    #: whether the plan leaves its parameters dense: such a part is no bucket of the plan, and has no
    #: sparsifier's state in a checkpoint. (A bucket that a rule of the recipe sends whole has one.)
    dense: bool

    @property
    def places(self) -> Sequence[tuple[int, int]]: ...

    def held(self) -> tuple[np.ndarray, ...]:
        """What waits here, [n] each, to be read only: residual and companions; nothing if nothing waits."""

    def blank(self) -> list[np.ndarray]:
        """Zeros for all that may wait here: [n] each, in the order of `held`."""

    def assign(self, held: Sequence[np.ndarray]) -> None:
        """Replaces what `held` gives."""

    def restart(self, progress: Progress | None = None) -> None:
        """Nothing waits any more, and the sparsifier's state is a new one; see `Bucket.restart`."""

    def shaped(self, number: int, values: np.ndarray) -> Any:
        """A copy of the elements of a parameter, by its number: as checkpoints hold them, in its shape."""

    def flat(self, number: int, values: Any) -> np.ndarray:
        """The inverse of `shaped`."""


class ArrayLayout:
    """Parameters of a part that lie one behind the other in a NumPy array: `Part`'s share in that."""

    shapes: list[tuple[int, ...]]

    @functools.cached_property
    def places(self) -> list[tuple[int, int]]:
        """[start, stop) of every parameter."""
        stops = np.cumsum([math.prod(shape) for shape in self.shapes]).tolist()
        return list(zip([0, *stops[:-1]], stops, strict=True))

    def shaped(self, number: int, values: np.ndarray) -> np.ndarray:
        return np.array(values).reshape(self.shapes[number])

    def flat(self, number: int, values: Any) -> np.ndarray:
        return np.asarray(values).reshape(-1)


class BucketPart:
    """What a part with a bucket holds back; each front end's is derived from it."""

    bucket: Bucket

    def held(self) -> tuple[np.ndarray, ...]:
        """See `Part.held`: views, where the accumulator is on the host."""
        return self.bucket.held()

    def blank(self) -> list[np.ndarray]:
        count, info = 1 + self.bucket.recipe.feedback.num_companions, self.bucket.whole
        return [np.zeros(info.num_elements, info.value_dtype) for _ in range(count)]

    def restart(self, progress: Progress | None = None) -> None:
        self.assign(self.blank())
        self.bucket.restart(progress)

    def assign(self, held: Sequence[np.ndarray]) -> None:
        self.bucket.load(held)


class DensePart:
    """What a part holds back that a plan leaves dense, and that needs no bucket; see `needs_bucket`."""

    names: tuple[str, ...]
    dense = True
    #: n, of all parameters together
    num_elements: int
    #: of its gradient, by name
    dtype: str
    #: what error feedback still held for it when it became dense; joins the next gradient
    carried: Any = None

    @property
    def title(self) -> str:
        """For messages."""
        others = len(self.names) - 1
        return self.names[0] + (f" and {others} more" if others else "")

    def held(self) -> tuple[np.ndarray, ...]:
        return () if self.carried is None else (self.carried,)

    def blank(self) -> list[np.ndarray]:
        return [np.zeros(self.num_elements, accumulator_dtype(self.dtype))]

    def restart(self, progress: Progress | None = None) -> None:
        self.carried = None

    def assign(self, held: Sequence[np.ndarray]) -> None:
        (self.carried,) = held

    def abandon(self, *, drop: bool = False, again: bool = False) -> None:
        """The step is taken back: a dense gradient of an abandoned step is dropped, as Horovod would."""

    def report(self, size: int, itemsize: int, gradient_bytes: int, seconds: float) -> BucketReport:
        """What has happened, for telemetry."""
        count = self.num_elements
        sent = (count + size) * itemsize
        step = BucketStep(self.title, count, count, count, count, sent, [sent])
        return BucketReport(step, count, gradient_bytes, np.zeros(size), 0.0, seconds)


def dense_groups(parameters: Sequence[ParameterFacts]) -> list[tuple[str, ...]]:
    """Names of dense parameters that are summed together: neighbours of one kind, up to a size.

    A collective for every bias takes the thread that computes longer than it takes the network. Where
    much has come together it is sent, so that it is under way while backward goes on.

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


def needs_bucket(dense: Recipe) -> bool:
    """Whether a parameter that a plan leaves dense needs a bucket, as its feedback keeps something.

    Momentum correction is one: without it a dense parameter would train without momentum. Everything is sent
    then, so the residual stays 0. Any other dense parameter needs nothing but `sum_densely`.
    """
    return dense.feedback.num_companions > 0 or getattr(dense.feedback, "clip_norm", None) is not None


def held_residuals(parts: Sequence[Part], num_companions: int) -> list[dict[str, Any]]:
    """Residuals, then each companion of the feedback: copies by parameter, in its shape."""
    arrays: list[dict[str, Any]] = [{} for _ in range(1 + num_companions)]
    for part in parts:
        for by_name, values in zip(arrays, part.held(), strict=False):
            for number, (name, place) in enumerate(zip(part.names, part.places, strict=True)):
                by_name[name] = part.shaped(number, values[slice(*place)])
    return arrays


def assign_residuals(
    parts: Sequence[Part], arrays: Sequence[Mapping[str, Any]], progress: Mapping[str, Progress]
) -> None:
    """Puts residuals and companions into parts, whose sparsifiers start anew; dense ones carry theirs."""
    for part in parts:
        part.restart(progress_of(part.names, progress))
        if any(name in by_name for by_name in arrays for name in part.names):
            part.assign(_filled(part, arrays, progress))


def gather_shards(
    parts: Sequence[Part], arrays: Sequence[Mapping[str, Any]], progress: Mapping[str, Progress]
) -> Synchronization[None]:
    """Brings what the ranks of a host hold of each other's shards to the ranks whose shards they are."""
    for part in parts:
        if isinstance(part, BucketPart):
            yield from part.bucket.gathered(_filled(part, arrays, progress))


def _filled(
    part: Part, arrays: Sequence[Mapping[str, Any]], progress: Mapping[str, Progress]
) -> list[np.ndarray]:
    """Returns a part's residual and companions, [n] each, from those of its parameters."""
    filled = part.blank()
    for by_name, into in zip(arrays, filled, strict=False):
        for number, (name, place) in enumerate(zip(part.names, part.places, strict=True)):
            if name in by_name:
                into[slice(*place)] = part.flat(number, by_name[name])
                if by_name is not arrays[0] and name in progress:
                    into[slice(*place)] *= _moved(part, progress[name])
    return filled


def _moved(part: Part, progress: Progress) -> float:
    """What a companion is multiplied by that comes from a bucket of another age."""
    if not isinstance(part, BucketPart) or (moved := getattr(part.bucket.feedback, "moved", None)) is None:
        return 1.0
    age = progress.age if progress.summed == part.bucket.summed else 0
    factor: float = moved(age, part.bucket.progress.age)
    return factor


def shared_out(held: Sequence[Mapping[str, Any]], factor: float, feedback: Feedback) -> list[dict[str, Any]]:
    """Residuals, and companions that add up like them, times a factor of another number of ranks."""
    return [
        {name: values * factor for name, values in by_name.items()}
        if factor != 1.0 and (number == 0 or getattr(feedback, "adds_up", True))
        else dict(by_name)
        for number, by_name in enumerate(held)
    ]


#: mark of a rank that refuses the step; those of NaN or Inf are above 0
REFUSED = -1.0


def sum_densely(
    name: str,
    gradient: np.ndarray,
    carried: Any,
    place: tuple[int, int],
    *,
    refused: bool = False,
    members: Members = (),
) -> Synchronization[np.ndarray]:
    """The sum over ranks by an allreduce, with the ranks' health behind it: NaN is met as in a bucket."""
    rank, size = place
    buffer = np.zeros(gradient.size + size, gradient.dtype)
    own = buffer[: gradient.size]
    np.add(gradient, carried, out=own)
    count, finite = own.size, np.isfinite(own)
    if refused:
        buffer[count + rank] = REFUSED
    elif not finite.all():
        stops = [stop for _, stop in members]
        buffer[count + rank] = 1 + np.searchsorted(stops, np.argmin(finite), side="right")
    total: np.ndarray = yield AllReduce(buffer)
    check_sum(name, total[count:], lambda: bool(np.isfinite(total[:count]).all()), members)
    return total[:count]


def check_sum(name: str, marks: np.ndarray, is_finite: Callable[[], bool], members: Members = ()) -> None:
    """Raises what a dense parameter's ranks have to say of themselves, or that their sum overflows."""
    if edited := np.flatnonzero(marks == REFUSED).tolist():
        raise EditedGradientError(name, dict.fromkeys(edited, "its own error says which"))
    if unhealthy := np.flatnonzero(marks).tolist():
        names = [member for member, _ in members] or [name]
        # float16 does not hold every number
        places = {rank: min(int(marks[rank]), len(names)) for rank in unhealthy}
        raise NonFiniteGradientError(name, {rank: names[place - 1] for rank, place in places.items()})
    if not is_finite():
        raise NonFiniteSumError(name, {}, name)


def progress_of(names: Iterable[str], known: Mapping[str, Progress]) -> Progress:
    """Of a new bucket, from that of its parameters in other buckets.

    Schedules go on at the largest step number; that of all others, where no parameter has one itself.
    """
    found = [known[name] for name in names if name in known]
    step = max((one.step for one in found or known.values()), default=0)
    age = min((one.age for one in found), default=0)  # nobody's companions pass for older ones than they are
    return dataclasses.replace(found[0] if found else Progress(), step=step, since=step - age)


def resumed(own: Progress, told: Mapping[str, Any] | None, step: int) -> Progress:
    """Where all ranks start a bucket's state anew at one step of the training.

    Example:
        >>> from horovod_sparse.training.encoding import to_plain
        >>> resumed(Progress(), to_plain(Progress(7, 0.1)), 7).learning_rate
        0.1
        >>> resumed(Progress(5, 0.2), to_plain(Progress(7, 0.1)), 7).learning_rate
        0.2
    """
    going_on = own if own.step or told is None else from_plain(own, told)
    # companions are this rank's own: those of a worker that has just come are made of nothing
    since = step - own.age
    return dataclasses.replace(going_on, step=step, since=since, summed=own.summed, leans=(0.0, 0.0))
