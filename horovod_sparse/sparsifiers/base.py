"""The base class of sparsifiers: arguments, a state, and one coroutine."""

from __future__ import annotations

import abc
import dataclasses
import functools
import zlib
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, final

import numpy as np

from horovod_sparse.arrays import Accumulator, Indices, Values
from horovod_sparse.arrays.whole import largest_magnitude
from horovod_sparse.checks import check_density
from horovod_sparse.collectives import AllGather, Request, Synchronization
from horovod_sparse.errors import ArgumentError
from horovod_sparse.sparsifiers.schedule import Schedule
from horovod_sparse.wire import Notes, SparseSum, WireFormat, pack, unpack_sum


def accumulator_dtype(gradient_dtype: str) -> np.dtype[Any]:
    """Returns the dtype of residuals: float64 for float64, else float32."""
    return np.dtype(np.float64 if gradient_dtype == "float64" else np.float32)


@dataclass(frozen=True)
class BucketInfo:
    """A bucket's name (equal on all ranks), size and dtype, with this rank and the number of ranks."""

    name: str
    num_elements: int
    rank: int = 0
    size: int = 1
    dtype: str = "float32"
    #: the bucket's number in its plan: layer names may differ between processes
    number: int | None = None

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """The dtype of accumulators and of values in messages."""
        return accumulator_dtype(self.dtype)


@dataclass(frozen=True)
class SparsifierState:
    """A sparsifier's state, saved in checkpoints; algorithms that keep more than the step derive from this.

    A state is a value: a step makes the next one, and a cancelled step drops it. Fields that differ between
    ranks are marked `LOCAL`; all others are equal on all ranks after every step, which a law checks, and
    ranks compare when Horovod starts again.
    """

    #: synchronizations done; the bucket counts them
    step: int = 0


class WholeSum(SparseSum):
    """A sum of all n elements, in their order; that of `Dense` may be a tensor on the gradient's device."""

    whole = True

    def __init__(self, values: Any, counts: np.ndarray, notes: Notes, largest: float | None = None) -> None:
        self.values, self.counts, self.notes = values, counts, notes
        if largest is not None:
            self.largest = largest
        self.facts: dict[str, float] = {}

    @functools.cached_property
    def largest(self) -> float:
        """The largest magnitude of the sum; NaN if one of its values is NaN."""
        return largest_magnitude(self.values)

    @functools.cached_property
    def indices(self) -> Indices:  # type: ignore[override]
        """The positions 0 to n - 1, since every element is sent; front ends do not need them."""
        return np.arange(len(self.values), dtype=np.int32)


@dataclass(frozen=True)
class Traffic:
    """Declares one collective of a step: its kind, and the bytes that this rank sends, which tests check."""

    kind: type[Request]
    #: payload bytes that this rank sends; the least, if it depends on the data
    bytes_sent: int
    #: the most, where it depends on the data
    at_most: int | None = None


#: cached, since it is needed several times a step, and making it checks its arguments
_wire_format = functools.lru_cache(maxsize=64)(WireFormat)


@dataclass(frozen=True, kw_only=True)
class Sparsifier(abc.ABC):
    """An algorithm with its arguments, as a frozen, picklable value: it may be made before `hvd.init()`.

    A subclass implements `synchronize`, a coroutine that turns a rank's accumulator into the global sparse
    sum by yielding collectives. It holds no state: that is in the object made by `init`.

    Args:
        density: kept fraction in (0, 1]. Whether of each rank's accumulator or of the union of all
            ranks is said by `density_scope`.
        values: how values travel: "exact" (as the accumulator has them), "float16", "bfloat16" or "2bit"
            (see `WireFormat`). The rounding error stays in the residual.
        indices: how indices travel: "int32", or "gaps" (bit-packed).
        schedule: of the density over the steps, where it is not always `density` (warm-up).
    """

    name: ClassVar[str]
    #: "per rank": each rank selects density * n, the union may be P times that. "global": the union is.
    density_scope: ClassVar[Literal["per rank", "global"]] = "per rank"
    #: whether a density can be chosen: a quantizer sends every element
    has_density: ClassVar[bool] = True

    density: float = 0.001
    values: str = "exact"
    indices: str = "int32"
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        check_density("density", self.density, "a kept fraction in (0, 1]")
        WireFormat(self.values, self.indices)
        if self.schedule is not None and not hasattr(self.schedule, "density_at"):
            allowed = "a schedule, such as exponential(steps=400), or None"
            raise ArgumentError("schedule", self.schedule, allowed)

    @final
    @property
    def wire(self) -> WireFormat:
        return _wire_format(self.values, self.indices)

    @final
    def density_at(self, step: int) -> float:
        """Returns the density in a step (from 0): the schedule's, or `density` without a schedule."""
        return self.density if self.schedule is None else self.schedule.density_at(step, self.density)

    @final
    def num_selected(self, info: BucketInfo, step: int) -> int:
        """Returns ``k = max(1, round(density * n))``, at most n, in a step (from 0)."""
        return min(info.num_elements, max(1, round(self.density_at(step) * info.num_elements)))

    def init(self, info: BucketInfo) -> SparsifierState:
        """Returns the state before the first step."""
        return SparsifierState()

    @abc.abstractmethod
    def synchronize(
        self, accumulator: Accumulator, state: Any, info: BucketInfo
    ) -> Synchronization[tuple[SparseSum, SparsifierState]]:
        """Runs a step of a bucket: selects, yields collectives, and clears the sent elements.

        The accumulator holds residual + gradient of this rank; what stays in it is the next residual. `state`
        is that of `init`, or of the step before. Returns the sum, and the state after the step.
        """

    @abc.abstractmethod
    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        """Declares this rank's collectives in a step, given how many elements each rank selected (`counts`).

        One entry for each request that `synchronize` yields, in order; their kinds are fixed for a number of
        ranks.
        """

    @final
    def rounds(self, size: int) -> tuple[type[Request], ...]:
        """Returns the kinds of collective that `synchronize` yields among `size` ranks, in order."""
        declared = self.traffic(BucketInfo("any", size, 0, size), np.ones(size, np.int64))
        return tuple(one.kind for one in declared)

    @final
    def describe(self) -> str:
        """Returns the sparsifier as text for `Compression.parse`, without arguments at their default."""
        return f"{self.name}:{arguments_text(self, always=('density',))}"


class Selected(NamedTuple):
    """The elements that `SelectAndGather.select` chose, with facts for the telemetry."""

    #: indices that this rank sends: int32, ascending and unique
    indices: Indices
    #: for the telemetry
    facts: dict[str, float] = {}  # noqa: RUF012
    #: the state after the step; None if it does not change
    state: SparsifierState | None = None


@dataclass(frozen=True, kw_only=True)
class SelectAndGather(Sparsifier):
    """Base of most algorithms: every rank selects, and one allgather brings all selections to all ranks.

    A subclass implements `select`. Selected elements leave the accumulator; their rounding errors stay.
    """

    #: True if the sum keeps the ranks' selections apart, so that the sender of every element is known
    names_senders: ClassVar[bool] = True

    @abc.abstractmethod
    def select(self, accumulator: Accumulator, k: int, state: Any, info: BucketInfo) -> Selected:
        """Selects the elements that this rank sends in this step; `k` is density times n."""

    def message_format(self, info: BucketInfo, step: int) -> WireFormat:
        return self.wire

    def synchronize(
        self, accumulator: Accumulator, state: Any, info: BucketInfo
    ) -> Synchronization[tuple[SparseSum, SparsifierState]]:
        indices, facts, after = self.select(accumulator, self.num_selected(info, state.step), state, info)
        wire = self.message_format(info, state.step)
        sent = accumulator.remove(indices, None if wire.exact else wire.round)
        sum_ = yield from exchange_selections(accumulator, indices, sent, info, wire)
        sum_.facts.update(facts)
        return sum_, state if after is None else after

    def traffic(self, info: BucketInfo, counts: np.ndarray, step: int = 0) -> tuple[Traffic, ...]:
        wire, count = self.message_format(info, step), int(counts[info.rank])
        return (Traffic(AllGather, wire.message_bytes(count, info.num_elements, info.value_dtype)),)


def exchange_selections(
    accumulator: Accumulator, indices: Indices, values: Values | None, info: BucketInfo, wire: WireFormat
) -> Synchronization[SparseSum]:
    """Allgathers every rank's selection, and returns their sum; without values the indices alone."""
    n = info.num_elements
    gathered = yield AllGather(pack(indices, values, accumulator.report, wire, n))
    return unpack_sum(gathered, info.size, wire, n, None if values is None else info.value_dtype)


def step_generator(seed: int, info: BucketInfo, step: int, rank: int | None = None) -> np.random.Generator:
    """Returns a random generator seeded by the seed, the bucket's number (or name), the step and the rank.

    No state has to be saved to resume, and the global seeds of NumPy or a framework are never touched.
    """
    drawn = info.name if info.number is None else f"bucket{info.number}"
    entropy = [seed, zlib.crc32(drawn.encode()), step, 0 if rank is None else 1 + rank]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def arguments_text(described: Any, always: tuple[str, ...] = ()) -> str:
    """Returns ``argument=value,argument=value`` for a dataclass; arguments at their default are left out."""
    return ",".join(
        f"{item.name}={value_text(getattr(described, item.name))}"
        for item in dataclasses.fields(described)
        if item.name in always or getattr(described, item.name) != item.default
    )


def value_text(value: Any) -> str:
    """Returns an argument's value as text that `feedback.recipe.parse_value` can read."""
    name = getattr(type(value), "text_name", None)
    if name is not None:
        return f"{name}({arguments_text(value)})"
    return value if isinstance(value, str) else repr(value)
