"""Fits: exact where the data are, steady against outliers, and no answer to nonsense."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.cost import AffineTime, fit_selection, fit_time
from horovod_sparse.errors import ArgumentError

SIZES = 2.0 ** np.arange(6, 24)


def test_noise_and_outliers_do_not_move_it() -> None:
    random = np.random.default_rng(1)
    sizes = np.repeat(SIZES, 15)
    times = (3e-4 + 2e-9 * sizes) * np.exp(random.normal(0.0, 0.05, sizes.size))
    times[random.random(sizes.size) < 0.1] *= 20
    fit = fit_time(sizes, times)
    assert fit.fixed_seconds == pytest.approx(3e-4, rel=0.05)
    assert fit.seconds_per_unit == pytest.approx(2e-9, rel=0.05)
    assert fit.r_squared > 0.99
    assert fit.num_points == SIZES.size
    assert fit.notes == ()


def test_a_size_that_is_wrong_altogether_does_not_move_it_far() -> None:
    times = 3e-4 + 2e-9 * SIZES
    times[5] *= 30
    fit = fit_time(SIZES, times)
    assert fit.fixed_seconds == pytest.approx(3e-4, rel=0.05)
    assert fit.seconds_per_unit == pytest.approx(2e-9, rel=0.05)
    assert fit.largest_error > 0.9
    assert fit.median_error < 0.05


def test_a_time_that_is_far_too_short_does_not_move_it_far() -> None:
    times = 3e-4 + 2e-9 * SIZES
    times[5] /= 30  # its relative error is 29
    fit = fit_time(SIZES, times)
    assert fit.fixed_seconds == pytest.approx(3e-4, rel=0.1)
    assert fit.seconds_per_unit == pytest.approx(2e-9, rel=0.1)


def test_residuals_are_those_of_the_medians() -> None:
    fit = fit_time([1, 2, 3], [1.0, 2.0, 3.0])
    assert (fit.fixed_seconds, fit.seconds_per_unit) == pytest.approx((0.0, 1.0), abs=1e-9)
    assert fit.r_squared == pytest.approx(1.0)
    assert fit.largest_error < 1e-9


def test_a_falling_time_is_cut_off_with_a_note() -> None:
    fit = fit_time([10, 20, 30, 40], [4.0, 3.0, 2.0, 1.0], what="allgather")
    assert fit.seconds_per_unit == 0.0
    assert 1.0 < fit.fixed_seconds < 4.0
    assert fit.notes == ("allgather: the time per amount came out negative and counts as 0",)


def test_a_negative_start_is_cut_off_with_a_note() -> None:
    fit = fit_time([10, 20, 30], [5.0, 15.0, 25.0])
    assert fit.fixed_seconds == 0.0
    assert fit.seconds_per_unit > 0.5
    assert "fixed part" in fit.notes[0]


def test_selection_has_two_slopes() -> None:
    n = np.repeat([10_000, 100_000, 1_000_000], 3)
    k = np.tile([1e-3, 1e-2, 1e-1], 3) * n
    fit = fit_selection(n, k, 1e-4 + 3e-10 * n + 2e-8 * k)
    assert (fit.fixed_seconds, fit.seconds_per_unit, fit.seconds_per_selected) == pytest.approx(
        (1e-4, 3e-10, 2e-8), rel=1e-4
    )
    assert fit.time(0.01).seconds(10**6) == pytest.approx(1e-4 + 3e-4 + 2e-4, rel=1e-4)


@pytest.mark.parametrize(
    ("sizes", "times", "match"),
    [
        ([1, 2], [1.0, 2.0], "2 distinct sizes"),
        ([1, 1, 2, 2], [1.0, 1.0, 2.0, 2.0], "2 distinct sizes"),
        ([1, 2, 3], [1.0, 2.0], "one time for every size"),
        ([1, 2, 3], [1.0, 0.0, 2.0], "positive, finite seconds"),
        ([1, 2, 3], [1.0, float("nan"), 2.0], "positive, finite seconds"),
        ([1, -2, 3], [1.0, 1.0, 2.0], "sizes of 0 or more"),
    ],
)
def test_nonsense_is_refused(sizes, times, match) -> None:
    with pytest.raises(ArgumentError, match=match):
        fit_time(sizes, times, what="broadcast")


def test_one_density_cannot_tell_n_and_k_apart() -> None:
    n = np.array([1e3, 1e4, 1e5, 1e6])
    with pytest.raises(ArgumentError, match="same proportion"):
        fit_selection(n, n / 100, 1e-4 + 1e-9 * n)


def test_times_of_nothing_and_of_many() -> None:
    time = AffineTime(1.0, 0.5)
    assert time.seconds(0) == 0.0
    assert time.seconds(np.array([0, 2, 4])).tolist() == [0.0, 2.0, 3.0]
    with pytest.raises(ArgumentError, match="fixed_seconds"):
        AffineTime(-1.0)
