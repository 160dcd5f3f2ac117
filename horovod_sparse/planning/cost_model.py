"""Costs of a bucket, and times fitted to measurements by medians and a line of least squares."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.checks import check_seconds
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.plans.dense import bytes_by_round
from horovod_sparse.sparsifiers import Sparsifier


class TimeModel(Protocol):
    """Seconds as a function of an amount (elements or bytes); nothing takes no time."""

    @property
    def fixed_seconds(self) -> float:
        """Seconds that are paid once however large the amount: two at once save them once."""
        ...

    def seconds(self, amount: Any) -> Any: ...


@dataclass(frozen=True)
class AffineTime:
    """``seconds = a + b * amount``, and 0 for an amount of 0.

    Args:
        fixed_seconds: a, 0 or more; of a collective: alpha.
        seconds_per_unit: b, 0 or more; of a collective: beta, per byte.

    Source: OMGS-SGD, Eq. (11).

    Example:
        >>> AffineTime(0.001, 1e-8).seconds(100_000)
        0.002
    """

    fixed_seconds: float = 0.0
    seconds_per_unit: float = 0.0

    def __post_init__(self) -> None:
        for argument in ("fixed_seconds", "seconds_per_unit"):
            check_seconds(argument, getattr(self, argument))

    def seconds(self, amount: Any) -> Any:
        """Seconds for an amount, or for every amount of an array."""
        if np.ndim(amount):
            amounts = np.asarray(amount, np.float64)
            return np.where(amounts > 0, self.fixed_seconds + self.seconds_per_unit * amounts, 0.0)
        return self.fixed_seconds + self.seconds_per_unit * amount if amount > 0 else 0.0

    def __add__(self, other: AffineTime) -> AffineTime:
        return AffineTime(
            self.fixed_seconds + other.fixed_seconds, self.seconds_per_unit + other.seconds_per_unit
        )

    def per(self, units: float, offset: float = 0.0) -> AffineTime:
        """The same time as a function of another amount x, where ``amount = offset + units * x``."""
        return AffineTime(self.fixed_seconds + self.seconds_per_unit * offset, self.seconds_per_unit * units)


@dataclass(frozen=True)
class Fit:
    """A fitted time ``a + b * amount (+ c * selected)``, and how good it is.

    Attributes:
        fixed_seconds: a.
        seconds_per_unit: b.
        seconds_per_selected: c; 0 where it was not asked for.
        num_points: distinct amounts that it stands on.
        median_error: median of |model - measured| / measured.
        largest_error: the largest of them.
    """

    fixed_seconds: float
    seconds_per_unit: float
    seconds_per_selected: float = 0.0
    num_points: int = 0
    median_error: float = 0.0
    largest_error: float = 0.0

    def __post_init__(self) -> None:
        self.time()  # refuses what is negative or not finite

    def time(self, density: float = 0.0) -> AffineTime:
        """The model as a function of one amount, selected = density * amount."""
        each = float(self.seconds_per_unit) + density * float(self.seconds_per_selected)
        return AffineTime(float(self.fixed_seconds), each)


def fit_time(
    amounts: Sequence[float],
    seconds: Sequence[float],
    selected: Sequence[float] | None = None,
    *,
    what: str = "amounts",
) -> Fit:
    """Fits ``seconds = a + b * amount (+ c * selected)``, none negative.

    Repetitions of a size count as their median, so that slow ones do not pull. Least squares of relative
    errors go through the medians: small messages, which fix a, weigh as much as large ones, which fix b.

    Args:
        amounts: bytes or elements, one per measurement.
        seconds: as many, positive.
        selected: k of every measurement; not in proportion to n throughout, or b and c would be one.
        what: names the measurement in errors.

    Raises:
        ArgumentError: fewer than 3 distinct sizes (4 with `selected`), k in proportion to n, or a time that
            is not a positive number.

    Example:
        >>> fit = fit_time([1000, 1000, 1000, 2000, 4000], [1.5, 1.5, 900.0, 2.0, 3.0])
        >>> round(fit.fixed_seconds, 6), round(fit.seconds_per_unit, 6)
        (1.0, 0.0005)
    """
    features, times = _medians(what, [amounts] if selected is None else [amounts, selected], seconds)
    design = np.column_stack([np.ones(len(times)), features])
    scale = np.abs(design).max(axis=0)
    design = design / scale / times[:, None]  # of relative times: 1 is right
    if np.linalg.matrix_rank(design) < design.shape[1]:
        raise ArgumentError(what, features.tolist(), "sizes that are not all in the same proportion")
    found = _least_squares(design)
    error = np.abs(design @ found - 1.0)
    fixed, each, of_selected = [*(found / scale).tolist(), 0.0][:3]
    return Fit(fixed, each, of_selected, len(times), float(np.median(error)), float(error.max()))


def _least_squares(design: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns x >= 0 with the least ``|design x - 1|``, by trying all choices of columns."""
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


def _medians(
    what: str, amounts: Sequence[Sequence[float]], seconds: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distinct rows of amounts, and the median time of each."""
    times = np.asarray(seconds, np.float64)
    rows = [np.asarray(column, np.float64) for column in amounts]
    if any(row.shape != times.shape for row in rows):
        shapes = [times.shape, *(row.shape for row in rows)]
        raise ArgumentError(what, f"arrays of shape {shapes}", "one time for every size")
    features = np.column_stack(rows)
    if not np.all(np.isfinite(features)) or np.any(features < 0):
        raise ArgumentError(what, features.tolist(), "finite sizes of 0 or more")
    if not np.all(np.isfinite(times)) or np.any(times <= 0.0):
        raise ArgumentError(what, times.tolist(), "positive, finite seconds: was anything measured?")
    distinct, number = np.unique(features, axis=0, return_inverse=True)
    needed = 2 + len(rows)
    if len(distinct) < needed:
        raise ArgumentError(what, f"{len(distinct)} distinct sizes", f"measurements of {needed} or more")
    number = number.reshape(-1)
    return distinct, np.array([np.median(times[number == i]) for i in range(len(distinct))])


#: Horovod's default (HOROVOD_FUSION_THRESHOLD).
FUSION_BYTES = 128 * 2**20


@dataclass(frozen=True)
class CostModel:
    """Times of what happens to a bucket or a dense parameter, for one sparsifier, density and cluster.

    Args:
        selection: of a bucket, by its elements n: what the thread that runs backward does for it.
        communication: of a bucket, by its n: from the first message to the last one's arrival.
        dense: allreduce of a parameter that stays dense, by its bytes.
        dense_work: for a parameter that stays dense, by its elements: what that thread does for it.
        fuse_dense: dense parameters that wait for the network together go as one allreduce, as Horovod
            does it: all but one save `dense.fixed_seconds`.
        fuse_sparse: the same for buckets. Horovod does this too for what waits at the same time; the
            paper's model, and `optimal`'s proof, are without it.
        fusion_bytes: at most so many bytes in one fused allreduce.

    Example:
        >>> cost = CostModel(AffineTime(0.0, 1e-9), AffineTime(1e-3, 1e-10), AffineTime(1e-3, 1e-8))
        >>> cost.communication.seconds(10_000_000)
        0.002
    """

    selection: TimeModel
    communication: TimeModel
    dense: TimeModel = AffineTime()
    dense_work: TimeModel = AffineTime()
    fuse_dense: bool = True
    fuse_sparse: bool = False
    fusion_bytes: int = FUSION_BYTES


def communication_of(sparsifier: Sparsifier, size: int, collectives: Mapping[str, AffineTime]) -> AffineTime:
    """Time of a bucket's rounds as a function of its n, from fitted collectives.

    What each round carries is the algorithm's own declaration (`Sparsifier.traffic`), read off at two
    bucket sizes; ranks are taken to select equally many.

    Args:
        sparsifier: which algorithm, at which density.
        size: P.
        collectives: time by the bytes that a rank puts in, by kind ("allgather", ...).

    Raises:
        UnknownNameError: if a kind that the sparsifier needs was not measured.
    """
    small, large = (bytes_by_round(sparsifier, size, n) for n in (2**20, 2**24))
    total = AffineTime()
    for (name, few), (_, many) in zip(small, large, strict=True):
        if name not in collectives:
            raise UnknownNameError("measured collective", name, collectives)
        per_element = (many - few) / (2**24 - 2**20)
        total += collectives[name].per(per_element, offset=max(0.0, few - per_element * 2**20))
    return total
