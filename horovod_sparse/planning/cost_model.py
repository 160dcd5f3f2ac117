"""Times as functions of an amount, fitted to measurements, and the costs of a bucket."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.checks import check_seconds
from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.errors import ArgumentError
from horovod_sparse.sparsifiers import BucketInfo, Sparsifier


@dataclass(frozen=True)
class AffineTime:
    """``seconds = fixed_seconds + seconds_per_unit * amount``, and 0 for an amount of 0.

    Of a collective, `fixed_seconds` is alpha, and `seconds_per_unit` is beta, per byte.

    Source: OMGS-SGD, Eq. (11).
    """

    fixed_seconds: float = 0.0
    seconds_per_unit: float = 0.0

    def __post_init__(self) -> None:
        for argument in ("fixed_seconds", "seconds_per_unit"):
            check_seconds(argument, getattr(self, argument))

    def seconds(self, amount: Any) -> Any:
        """Returns the seconds for an amount, or for every amount of an array."""
        if np.ndim(amount):
            amounts = np.asarray(amount, np.float64)
            return np.where(amounts > 0, self.fixed_seconds + self.seconds_per_unit * amounts, 0.0)
        return self.fixed_seconds + self.seconds_per_unit * amount if amount > 0 else 0.0

    def __add__(self, other: AffineTime) -> AffineTime:
        return AffineTime(
            self.fixed_seconds + other.fixed_seconds, self.seconds_per_unit + other.seconds_per_unit
        )

    def per(self, units: float, offset: float = 0.0) -> AffineTime:
        """Returns the same time as a function of x, where ``amount = offset + units * x``."""
        return AffineTime(self.fixed_seconds + self.seconds_per_unit * offset, self.seconds_per_unit * units)


@dataclass(frozen=True)
class Fit:
    """A fitted time ``a + b * amount (+ c * selected)``, and how good it is."""

    fixed_seconds: float
    seconds_per_unit: float
    #: 0 where it was not asked for
    seconds_per_selected: float = 0.0
    #: distinct amounts that it stands on
    num_points: int = 0
    #: median of |model - measured| / measured, and the largest of them
    median_error: float = 0.0
    largest_error: float = 0.0

    def __post_init__(self) -> None:
        self.time()  # refuses what is negative or not finite

    def time(self, density: float = 0.0) -> AffineTime:
        """Returns the model as a function of one amount, with selected = density * amount."""
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
    `what` names the measurement in errors: of fewer than 3 distinct sizes (4 with `selected`), k in
    proportion to n, or times that are no positive numbers.
    """
    given = (seconds, amounts) if selected is None else (seconds, amounts, selected)
    rows = [np.asarray(row, np.float64) for row in given]
    if len({row.shape for row in rows}) > 1:
        raise ArgumentError(what, f"arrays of shape {[row.shape for row in rows]}", "one time for every size")
    times, features = rows[0], np.column_stack(rows[1:])
    if not np.all(np.isfinite(features)) or np.any(features < 0):
        raise ArgumentError(what, features.tolist(), "finite sizes of 0 or more")
    if not np.all(np.isfinite(times)) or np.any(times <= 0.0):
        raise ArgumentError(what, times.tolist(), "positive, finite seconds: was anything measured?")
    sizes, number = np.unique(features, axis=0, return_inverse=True)
    if len(sizes) <= len(rows):
        raise ArgumentError(what, f"{len(sizes)} distinct sizes", f"measurements of {1 + len(rows)} or more")
    medians = np.array([np.median(times[number.reshape(-1) == i]) for i in range(len(sizes))])
    design = np.column_stack([np.ones(len(sizes)), sizes])
    scale = np.abs(design).max(axis=0)
    design = design / scale / medians[:, None]  # of relative times: 1 is right
    if np.linalg.matrix_rank(design) < design.shape[1]:
        raise ArgumentError(what, sizes.tolist(), "sizes that are not all in the same proportion")
    found = _least_squares(design)
    error = np.abs(design @ found - 1.0)
    fixed, each, of_selected = [*(found / scale).tolist(), 0.0][:3]
    return Fit(fixed, each, of_selected, len(sizes), float(np.median(error)), float(error.max()))


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


@dataclass(frozen=True)
class CostModel:
    """Times of what happens to a bucket or a dense parameter, for one sparsifier, density and cluster.

    What waits for the network together may go as one, as Horovod does it: all but one save `fixed_seconds`.
    The paper's model, and `optimal`'s proof, are without it for buckets.
    """

    #: of a bucket, by its elements n: what the thread that runs backward does for it
    selection: AffineTime
    #: of a bucket, by its n: from the first message to the last one's arrival
    communication: AffineTime
    #: allreduce of a parameter that stays dense, by its bytes; and that thread's work, by its elements
    dense: AffineTime = AffineTime()
    dense_work: AffineTime = AffineTime()
    fuse_dense: bool = True
    fuse_sparse: bool = False
    #: at most so many in one fused allreduce (HOROVOD_FUSION_THRESHOLD)
    fusion_bytes: int = 128 * 2**20


def communication_of(sparsifier: Sparsifier, size: int, collectives: Mapping[str, AffineTime]) -> AffineTime:
    """Returns the time of a bucket's rounds among `size` ranks, by its n, from fitted collectives.

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
    """Yields every round's kind and the bytes of its busiest sender, at the final density of a schedule."""
    selected = max(1, round(sparsifier.density * num_elements))
    if sparsifier.density_scope != "per rank":
        from horovod_sparse.sparsifiers.exclusive import ExclusiveThreshold  # which top-k does without

        # windows that exclude each other share k out; elsewhere every rank's own count is k
        if isinstance(sparsifier, ExclusiveThreshold):
            selected = max(1, round(selected / size))
    counts = np.full(size, selected, np.int64)
    by_rank = [
        sparsifier.traffic(BucketInfo("bucket", num_elements, rank, size, "float32"), counts)
        for rank in range(min(size, 4))  # ranks may play different parts: a broadcast has a root
    ]
    for traffic in zip(*by_rank, strict=True):
        yield COLLECTIVES[traffic[0].kind], max(item.bytes_sent for item in traffic)
