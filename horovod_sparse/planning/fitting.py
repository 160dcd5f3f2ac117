"""Fitting times to measurements so that a few slow repetitions do not matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.errors import ArgumentError
from horovod_sparse.planning.cost_model import AffineTime

#: Relative residuals beyond this pull linearly instead of quadratically (Huber).
_HUBER = 0.05
_REPETITIONS = 12


@dataclass(frozen=True)
class Fit:
    """A fitted time ``a + b * amount (+ c * selected)``, and how good it is.

    Attributes:
        fixed_seconds: a.
        seconds_per_unit: b.
        seconds_per_selected: c; 0 where it was not asked for.
        num_points: distinct amounts that it stands on.
        r_squared: share of the variance of the medians that the model explains; 1 is perfect, and
            below 0 it explains less than their mean would.
        median_error: median of |model - measured| / measured.
        largest_error: the largest of them.
        notes: what a user should know (a slope that had to be cut off at 0).
    """

    fixed_seconds: float
    seconds_per_unit: float
    seconds_per_selected: float = 0.0
    num_points: int = 0
    r_squared: float = 1.0
    median_error: float = 0.0
    largest_error: float = 0.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", tuple(self.notes))
        self.time()  # refuses what is negative or not finite

    def time(self, density: float = 0.0) -> AffineTime:
        """The model as a function of one amount, selected = density * amount."""
        return AffineTime(
            float(self.fixed_seconds),
            float(self.seconds_per_unit) + density * float(self.seconds_per_selected),
        )


def fit_time(amounts: Sequence[float], seconds: Sequence[float], *, what: str = "amounts") -> Fit:
    """Fits ``seconds = a + b * amount``, a and b not negative.

    Repetitions of an amount count as their median. Errors are relative, so that small messages, which
    fix a, weigh as much as large ones, which fix b; and Huber's loss keeps outliers from pulling.

    Args:
        amounts: bytes or elements, one per measurement.
        seconds: as many, positive.
        what: names the measurement in errors and notes.

    Raises:
        ArgumentError: if there are fewer than 3 distinct amounts, or a time is not a positive number.

    Example:
        >>> fit = fit_time([1000, 1000, 1000, 2000, 4000], [1.5, 1.5, 900.0, 2.0, 3.0])
        >>> round(fit.fixed_seconds, 6), round(fit.seconds_per_unit, 6)
        (1.0, 0.0005)
    """
    fixed, slope, quality = _fit(what, {"amount": amounts}, seconds)
    return Fit(fixed, slope[0], **quality)


def fit_selection(
    num_elements: Sequence[float],
    num_selected: Sequence[float],
    seconds: Sequence[float],
    *,
    what: str = "selection",
) -> Fit:
    """Fits ``seconds = a + b * n + c * k``, none negative.

    Args:
        num_elements: n of every measurement.
        num_selected: its k; must not be proportional to n throughout, or b and c cannot be told apart.
        seconds: as many, positive.
        what: names the measurement in errors and notes.

    Raises:
        ArgumentError: as `fit_time` (4 distinct points here), or if k follows n.

    Example:
        >>> n, k = [1000, 2000, 2000, 4000], [10, 10, 40, 20]
        >>> fit = fit_selection(n, k, [1 + 0.01 * n + 0.1 * k for n, k in zip(n, k)])
        >>> round(fit.seconds_per_unit, 6), round(fit.seconds_per_selected, 6)
        (0.01, 0.1)
    """
    amounts = {"element": num_elements, "selected element": num_selected}
    fixed, slopes, quality = _fit(what, amounts, seconds)
    return Fit(fixed, slopes[0], slopes[1], **quality)


def _fit(
    what: str, amounts: Mapping[str, Sequence[float]], seconds: Sequence[float]
) -> tuple[float, list[float], dict[str, Any]]:
    features, times = _medians(what, amounts, seconds)
    design = np.column_stack([np.ones(len(times)), features])
    scale = np.abs(design).max(axis=0)
    if np.linalg.matrix_rank(design / scale / times[:, None]) < design.shape[1]:
        raise ArgumentError(what, features.tolist(), "sizes that are not all in the same proportion")
    solution, notes = _huber(design / scale, times, -np.inf), []
    if np.any(solution < 0.0):
        names = ("fixed part", *(f"time per {name}" for name in amounts))
        # rounding leaves tiny negative numbers where the truth is 0: not worth a note
        matters = np.abs(design / scale * solution / times[:, None]).max(axis=0) > 1e-6
        notes = [
            f"{what}: the {name} came out negative and counts as 0"
            for name, value, told in zip(names, solution, matters, strict=True)
            if value < 0.0 and told
        ]
        bounded = _huber(design / scale, times, 0.0)
        solution = np.where(bounded < 1e-10 * max(float(bounded.max()), 1e-300), 0.0, bounded)
    model = design / scale @ solution
    error = np.abs(model - times) / times
    variance = float(np.sum((times - times.mean()) ** 2))
    explained = 1.0 - float(np.sum((times - model) ** 2)) / variance if variance > 0.0 else 1.0
    coefficients = (solution / scale).tolist()
    quality = {
        "num_points": len(times),
        "r_squared": explained,
        "median_error": float(np.median(error)),
        "largest_error": float(error.max()),
        "notes": tuple(notes),
    }
    return coefficients[0], coefficients[1:], quality


def _huber(design: NDArray[np.float64], times: NDArray[np.float64], lower: float) -> NDArray[np.float64]:
    """Coefficients that are least off relatively, by Huber's loss.

    Errors are divided by the model's time, not the measured one: a time that is far too short would
    otherwise get a weight of its own making. As the model is not known before, this is repeated.
    """
    from scipy.optimize import least_squares

    reference, solution = times, np.zeros(design.shape[1])
    for _ in range(_REPETITIONS):
        weighted, target = design / reference[:, None], times / reference
        start = np.linalg.lstsq(weighted, target, rcond=None)[0]
        solution = least_squares(
            lambda x, weighted=weighted, target=target: weighted @ x - target,
            np.maximum(start, lower) + (0.0 if np.isinf(lower) else 1e-12),
            bounds=(lower, np.inf),
            loss="huber",
            f_scale=_HUBER,
            xtol=1e-14,
            ftol=1e-14,
            gtol=1e-14,
        ).x
        # within bounds, lest a bad beginning make errors of some sizes count for nothing
        model = np.clip(design @ solution, times / 100.0, times * 100.0)
        if np.allclose(model, reference, rtol=1e-6):
            break
        reference = model
    return np.asarray(solution)


def _medians(
    what: str, amounts: Mapping[str, Sequence[float]], seconds: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distinct rows of amounts, and the median time of each."""
    times = np.asarray(seconds, np.float64)
    rows = [np.asarray(column, np.float64) for column in amounts.values()]
    if times.ndim != 1 or any(row.shape != times.shape for row in rows):
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
