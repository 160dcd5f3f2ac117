"""Totals of a step and means over steps."""

import math

import numpy as np
import pytest

from horovod_sparse.telemetry import BucketReport, BucketStep, StepReport, Telemetry


def bucket(name, num_elements, selected, union, norms, **more):
    step = BucketStep(
        name, num_elements, num_target=10, num_selected=selected, bytes_sent=8 * selected, **more
    )
    return BucketReport(step, union, 4 * num_elements, norms, wait_seconds=0.5, apply_seconds=0.25)


def test_totals_over_buckets():
    report = StepReport.of(
        3,
        [
            bucket("a", 600, 12, 20, np.array([3.0, 1.0]), residual_norm=3.0, fold_seconds=1.0),
            bucket("b", 400, 8, 10, np.array([4.0, 2.0]), residual_norm=4.0, select_seconds=2.0),
        ],
        wait_seconds=0.5,
    )
    assert report.step == 3
    assert (report.density_target, report.density_selected, report.density_union) == (0.02, 0.02, 0.03)
    assert (report.bytes_sent, report.dense_bytes, report.saving) == (160, 4000, 25.0)
    assert report.residual_norm == 5.0
    # every rank's norm over the whole model first, then the mean over ranks
    assert report.global_error == pytest.approx((5.0 + math.sqrt(5.0)) / 2)
    assert (report.fold_seconds, report.select_seconds) == (1.0, 2.0)
    assert (report.wait_seconds, report.apply_seconds) == (0.5, 0.5)
    assert [item.step.bucket for item in report.buckets] == ["a", "b"]


def test_means_follow_the_steps_and_can_start_anew():
    telemetry = Telemetry()
    assert telemetry.mean is None
    for number, selected in enumerate((10, 20, 60), start=1):
        telemetry.record(number, [bucket("a", 1000, selected, 2 * selected, None)], 0.1 * number)
    mean = telemetry.mean
    assert (mean.step, mean.num_selected, mean.density_union) == (3, 30, 0.06)
    assert mean.wait_seconds == pytest.approx(0.25)  # in the first one kernels are compiled
    assert telemetry.last.num_selected == 60
    assert "mean of 3 steps" in telemetry.summary()
    assert mean.summary() in telemetry.summary()
    telemetry.reset()
    assert telemetry.mean is None
    assert telemetry.last.num_selected == 60
    for seconds in (0.3, 0.5):
        telemetry.record(3, telemetry.last.buckets, seconds)
    assert (telemetry.mean.num_selected, telemetry.mean.wait_seconds) == (60, pytest.approx(0.4))


def test_a_first_step_alone_an_unknown_norm_and_nothing_at_all():
    telemetry = Telemetry(transport="MPI")
    assert telemetry.summary() == "no step yet"
    telemetry.record(1, [bucket("a", 10, 1, 1, np.ones(2)), bucket("b", 10, 1, 1, None)], 0.5)
    assert telemetry.summary().endswith("; pairs of ranks by MPI")
    assert telemetry.mean.wait_seconds == 0.5 and math.isnan(telemetry.last.global_error)
    report = StepReport.of(1, [], 0.0)
    assert (report.density_target, report.density_selected, report.density_union) == (0.0, 0.0, 0.0)
    assert report.saving == math.inf
    assert "no gradient for a sparsifier" in report.summary() and "inf" not in report.summary()


def test_scalars_are_the_last_steps_numbers_by_name():
    telemetry = Telemetry()
    assert telemetry.scalars() == {}
    telemetry.record(1, [bucket("a", 600, 12, 20, None, facts={"threshold": 1.0})], 0.5)
    telemetry.record(2, [bucket("a", 600, 6, 9, None, facts={"threshold": 2.0, "bad": math.inf})], 0.25)
    found = telemetry.scalars("s.")
    assert found["s.density_union"] == 9 / 600 and found["s.saving"] == 4 * 600 / (8 * 6)
    assert found["s.threshold"] == 2.0 and found["s.wait_ms"] == 250.0
    assert found["s.buckets"] == 1.0, "a jump of it is a new plan"
    # what is not known is left out: a curve of NaN is none
    assert "s.global_error" not in found and "s.bad" not in found
