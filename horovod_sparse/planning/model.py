"""Predicts a step under a plan, from times fitted to measurements: computation, and one network queue."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.checks import check_seconds
from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.errors import ArgumentError, ProfileMismatchError
from horovod_sparse.plans import ParameterFacts, Plan, by_kind
from horovod_sparse.sparsifiers import BucketInfo, Sparsifier


@dataclass(frozen=True)
class AffineTime:
    """A time that is linear in an amount: ``fixed_seconds + seconds_per_unit * amount``; 0 for amount 0.

    Of a collective, `fixed_seconds` is alpha, and `seconds_per_unit` is beta, per byte.

    Source: OMGS-SGD, Eq. (11).
    """

    fixed_seconds: float = 0.0
    seconds_per_unit: float = 0.0

    def __post_init__(self) -> None:
        for argument in ("fixed_seconds", "seconds_per_unit"):
            check_seconds(argument, getattr(self, argument))

    def seconds(self, amount: Any) -> Any:
        """Returns the seconds for an amount (of bytes or elements), or for each amount of an array."""
        if np.ndim(amount):
            amounts = np.asarray(amount, np.float64)
            return np.where(amounts > 0, self.fixed_seconds + self.seconds_per_unit * amounts, 0.0)
        return self.fixed_seconds + self.seconds_per_unit * amount if amount > 0 else 0.0

    def __add__(self, other: AffineTime) -> AffineTime:
        return AffineTime(
            self.fixed_seconds + other.fixed_seconds, self.seconds_per_unit + other.seconds_per_unit
        )

    def per(self, units: float, offset: float = 0.0) -> AffineTime:
        """Returns the time as a function of another amount x, where ``amount = offset + units * x``."""
        return AffineTime(self.fixed_seconds + self.seconds_per_unit * offset, self.seconds_per_unit * units)


@dataclass(frozen=True)
class Fit(AffineTime):
    """A time ``a + b * amount (+ c * selected)`` fitted to measurements, and its error."""

    #: 0 unless selected sizes were given
    seconds_per_selected: float = 0.0
    #: number of distinct amounts measured
    num_points: int = 0
    #: median of |model - measured| / measured, and the largest of them
    median_error: float = 0.0
    largest_error: float = 0.0

    def time(self, density: float = 0.0) -> AffineTime:
        """Returns the time by the amount alone, if the share `density` of the amount is selected."""
        each = float(self.seconds_per_unit) + density * float(self.seconds_per_selected)
        return AffineTime(float(self.fixed_seconds), each)


def fit_time(
    amounts: Sequence[float],
    seconds: Sequence[float],
    selected: Sequence[float] | None = None,
    *,
    what: str = "amounts",
) -> Fit:
    """Fits ``seconds = a + b * amount (+ c * selected)`` to measurements, with a, b, c not negative.

    Repetitions of a size count as their median, so that slow ones do not pull. Least squares of relative
    errors go through the medians: small messages, which fix a, weigh as much as large ones, which fix b.
    `what` names the measurement in errors.
    """
    features = np.column_stack([amounts] if selected is None else [amounts, selected])
    times = np.asarray(seconds, np.float64)
    if not np.all(np.isfinite(times)) or np.any(times <= 0.0):
        raise ArgumentError(what, times.tolist(), "positive, finite seconds, as measurements have")
    sizes, number = np.unique(features, axis=0, return_inverse=True)
    medians = np.array([np.median(times[number.reshape(-1) == i]) for i in range(len(sizes))])
    design = np.column_stack([np.ones(len(sizes)), sizes])
    scale = np.abs(design).max(axis=0)
    design = design / scale / medians[:, None]  # in relative times: 1 is exact
    found = _least_squares(design)
    error = np.abs(design @ found - 1.0)
    fixed, each, of_selected = [*(found / scale).tolist(), 0.0][:3]
    return Fit(fixed, each, of_selected, len(sizes), float(np.median(error)), float(error.max()))


def _least_squares(design: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the x >= 0 that minimizes ``|design x - 1|``, by solving for every subset of columns."""
    ones, count = np.ones(len(design)), design.shape[1]
    best, least = np.zeros(count), np.inf
    for size in range(1, count + 1):
        for columns in itertools.combinations(range(count), size):
            solved = np.linalg.lstsq(design[:, columns], ones, rcond=None)[0]
            error = float(np.sum((design[:, columns] @ solved - ones) ** 2))
            if solved.min() >= 0.0 and error < least:
                best, least = np.zeros(count), error
                best[list(columns)] = solved
    return best


@dataclass(frozen=True)
class CostModel:
    """Predicted times of a bucket or dense parameter, for one sparsifier, density and cluster.

    Messages that wait for the network together may be fused, as in Horovod: `fixed_seconds` then counts once.
    The paper's model, and `optimal`'s proof, are without it for buckets.
    """

    #: seconds of backward's thread for a bucket (fold and selection), by its elements n
    selection: AffineTime
    #: seconds from a bucket's first message to the last one's arrival, by its n
    communication: AffineTime
    #: seconds of a dense parameter's allreduce, by its bytes; and of backward's thread, by its elements
    dense: AffineTime = AffineTime()
    dense_work: AffineTime = AffineTime()
    fuse_dense: bool = True
    fuse_sparse: bool = False
    #: most bytes of one fused allreduce (HOROVOD_FUSION_THRESHOLD)
    fusion_bytes: int = 128 * 2**20


def communication_of(sparsifier: Sparsifier, size: int, collectives: Mapping[str, AffineTime]) -> AffineTime:
    """Returns the time of a bucket's collectives by its number of elements, from fitted collectives' times.

    What each round carries is the algorithm's own declaration (`Sparsifier.traffic`), read off at two
    bucket sizes; ranks are taken to select equally many. `collectives` has the time of every kind, by the
    bytes that a rank puts in.
    """
    small, large = (bytes_by_round(sparsifier, size, n) for n in (2**20, 2**24))
    total = AffineTime()
    for (name, few), (_, many) in zip(small, large, strict=True):
        per_element = (many - few) / (2**24 - 2**20)
        total += collectives[name].per(per_element, offset=max(0.0, few - per_element * 2**20))
    return total


def bytes_by_round(sparsifier: Sparsifier, size: int, num_elements: int) -> Iterator[tuple[str, int]]:
    """Yields each round's kind of collective, and the bytes of the rank that sends most, at `density`."""
    selected = max(1, round(sparsifier.density * num_elements))
    if sparsifier.density_scope != "per rank":
        from horovod_sparse.sparsifiers.exclusive import ExclusiveThreshold  # which top-k does without

        # exclusive windows divide k among ranks; elsewhere every rank selects k
        if isinstance(sparsifier, ExclusiveThreshold):
            selected = max(1, round(selected / size))
    counts = np.full(size, selected, np.int64)
    by_rank = [
        sparsifier.traffic(BucketInfo("bucket", num_elements, rank, size, "float32"), counts)
        for rank in range(min(size, 4))  # ranks may send different amounts: a broadcast has a root
    ]
    for traffic in zip(*by_rank, strict=True):
        yield COLLECTIVES[traffic[0].kind], max(item.bytes_sent for item in traffic)


@dataclass(frozen=True)
class Workload:
    """A model's parameters and their seconds of backward: what plans are predicted for.

    Args:
        parameters: in the order in which the model uses them (forward).
        backward_seconds: as many; from the gradient before it (in backward order) to its own.
        forward_seconds: of the step before backward begins.
        dense: names of parameters that are not sparsified; their allreduce shares the network.
    """

    parameters: tuple[ParameterFacts, ...]
    backward_seconds: tuple[float, ...]
    forward_seconds: float = 0.0
    dense: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.parameters and not any(self.backward_seconds):
            raise ProfileMismatchError("backward takes no time for any parameter: measure the profile anew")

    @property
    def backward(self) -> tuple[ParameterFacts, ...]:
        """The parameters in the order in which backward computes their gradients."""
        return self.parameters[::-1]

    @property
    def sparse(self) -> tuple[ParameterFacts, ...]:
        """The parameters that are sparsified, in forward order."""
        return tuple(parameter for parameter in self.parameters if parameter.name not in self.dense)

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The names of parameters that stay dense, in backward order."""
        return tuple(parameter.name for parameter in self.backward if parameter.name in self.dense)

    def with_dense(self, dense: Collection[str]) -> Workload:
        return replace(self, dense=frozenset(dense))


def plan_of_segments(workload: Workload, segments: Sequence[int]) -> Plan:
    """Returns the plan with at least one bucket for each segment of sparse parameters, in backward order.

    `segments` are the positions at which segments end, ascending; the last is the number of parameters.
    """
    backward, starts = workload.sparse[::-1], [0, *segments]
    merged = [by_kind(backward[start:stop]) for start, stop in itertools.pairwise(starts)]
    return Plan(tuple(bucket for buckets in merged for bucket in buckets), workload.dense_names)


class BusyTime(NamedTuple):
    """Begin and end of one piece of work of computation or network, in seconds since the step began.

    `kind` is "forward", "backward", "selection" (of a bucket) or "packing" (of a parameter that stays dense)
    in computation, and "sparse" or "dense" in communication.
    """

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A predicted step: when computation and the network are busy."""

    computation: tuple[BusyTime, ...]
    communication: tuple[BusyTime, ...]

    @property
    def iteration_seconds(self) -> float:
        """The seconds until the last communication ends, Eq. (17)."""
        return max((span.end for span in (*self.computation, *self.communication)), default=0.0)


class _Message(NamedTuple):
    kind: str
    ready: float
    seconds: float
    num_bytes: int = 0


def predict(workload: Workload, plan: Plan, cost: CostModel) -> Timeline:
    """Predicts a step under a plan, by Eqs. (5) to (8) and (17) of OMGS-SGD.

    Computation: backward of one parameter after the other; after the last gradient of a bucket its
    selection, and then backward goes on. Communication: one message at a time, in the order in which they
    are ready. A dense parameter is ready with its gradient. Messages that are ready together are fused if
    `cost` says so.
    """
    plan.check(workload.parameters)
    elements = {parameter.name: parameter.num_elements for parameter in workload.parameters}
    bucket_of = {name: number for number, names in enumerate(plan.buckets) for name in names}
    missing = [len(names) for names in plan.buckets]
    computation: list[BusyTime] = []
    messages: list[_Message] = []

    def append_busy_time(kind: str, seconds: float) -> float:
        start = computation[-1].end if computation else 0.0
        computation.append(BusyTime(kind, start, start + seconds))
        return start + seconds

    if workload.forward_seconds:
        append_busy_time("forward", workload.forward_seconds)
    for parameter, seconds in zip(workload.backward, reversed(workload.backward_seconds), strict=True):
        ready, number = append_busy_time("backward", seconds), bucket_of.get(parameter.name)
        if number is None:
            if packing := float(cost.dense_work.seconds(parameter.num_elements)):
                ready = append_busy_time("packing", packing)
            size = parameter.num_bytes
            messages.append(_Message("dense", ready, float(cost.dense.seconds(size)), size))
            continue
        missing[number] -= 1
        if missing[number] == 0:
            total = sum(elements[name] for name in plan.buckets[number])
            ready = append_busy_time("selection", float(cost.selection.seconds(total)))
            messages.append(_Message("sparse", ready, float(cost.communication.seconds(total))))
    return Timeline(tuple(computation), tuple(_predict_network(messages, cost)))


def _predict_network(messages: list[_Message], cost: CostModel) -> list[BusyTime]:
    """Predicts when the network sends each message, one at a time; fuses ready ones if `cost` says so."""
    startup = {"sparse": cost.communication.fixed_seconds, "dense": cost.dense.fixed_seconds}
    fused = {"sparse": cost.fuse_sparse, "dense": cost.fuse_dense}
    spans, free = list[BusyTime](), 0.0
    while messages:
        first, *others = messages
        start, num_bytes, seconds, messages = max(free, first.ready), first.num_bytes, first.seconds, []
        for one in others:
            alike = fused[first.kind] and one.kind == first.kind and one.ready <= start
            if alike and num_bytes + one.num_bytes <= cost.fusion_bytes:
                num_bytes, seconds = num_bytes + one.num_bytes, seconds + one.seconds - startup[one.kind]
            else:
                messages.append(one)
        free = start + seconds
        spans.append(BusyTime(first.kind, start, free))
    return spans
