"""Backward times from stamps of a fake clock."""

from __future__ import annotations

import pytest

from horovod_sparse.errors import ArgumentError, ProfileMismatchError
from horovod_sparse.frontend.calibration.backward_times import BackwardRecorder, BackwardTimes, mean_times
from horovod_sparse.simulation import run_lockstep


def step(recorder, gaps, start=100.0, hook=0.5, end=None):
    """One step whose gradients come after these gaps; every hook takes half a second itself."""
    clock = start
    recorder.begin(clock)
    for name, gap in gaps.items():
        clock += gap
        recorder.arrived(name, clock, clock + hook)
        clock += hook
    recorder.end(None if end is None else start + end)


def test_medians_of_the_steps_after_the_warm_up_without_the_hooks_own_time():
    recorder = BackwardRecorder(["a", "b", "c"], num_warmup=1, num_steps=3)
    step(recorder, {"c": 90.0, "b": 90.0, "a": 90.0})  # compiles
    for extra in (0.0, 50.0, 1.0):  # one slow step changes no median
        step(recorder, {"c": 3.0 + extra, "b": 2.0, "a": 4.0 + extra}, end=99.0)
    assert recorder.done
    assert recorder.times() == BackwardTimes({"c": 0.0, "b": 2.0, "a": 5.0}, 4.0, 3, (9.0, 109.0, 11.0), 99.0)
    step(recorder, {"c": 900.0, "b": 900.0, "a": 900.0})  # not asked for any more
    assert recorder.times().forward_seconds == 4.0


def test_what_delays_another_gradient_in_every_step_counts_for_all():
    """Each step is 9 s longer than the medians of its gradients: all are scaled from 4 to 13."""
    recorder = BackwardRecorder(["a", "b", "c"], num_warmup=0, num_steps=3)
    for late in "abc":
        step(recorder, {name: 1.0 + (name == late) * 9.0 + (name == "c") for name in "cba"})
    times = recorder.times()
    assert times.step_seconds == (13.0, 13.0, 13.0)
    assert times.forward_seconds + sum(times.backward_seconds.values()) == pytest.approx(13.0)
    assert times.backward_seconds["a"] == times.backward_seconds["b"] == pytest.approx(13.0 / 4.0)


def test_order_is_that_of_arrival_and_what_never_comes_is_last():
    recorder = BackwardRecorder(["a", "b", "unused", "c"], num_warmup=0, num_steps=2)
    for _ in range(2):
        step(recorder, {"b": 1.0, "c": 2.0, "a": 3.0})
    times = recorder.times()
    assert list(times.backward_seconds) == ["b", "c", "a", "unused"]
    assert times.backward_seconds["unused"] == 0.0


def test_stamps_may_be_events():
    between = []

    def milliseconds(start, stop):
        between.append((start, stop))
        return {"begun-b": 1e-3, "b'-a": 2e-3}[f"{start}-{stop}"]

    recorder = BackwardRecorder(["a", "b"], num_warmup=0, num_steps=1, seconds_between=milliseconds)
    recorder.begin("begun")
    recorder.arrived("b", "b", "b'")
    recorder.arrived("a", "a", "a'")
    assert not between, "events are read when the step has ended"
    recorder.end()
    assert recorder.times() == BackwardTimes({"b": 0.0, "a": 2e-3}, 1e-3, 1, (3e-3,))


def test_the_first_step_has_no_beginning_and_one_that_was_given_up_does_not_count():
    recorder = BackwardRecorder(["a"], num_warmup=0, num_steps=1)
    recorder.arrived("a", 1.0, 1.0)
    recorder.end()
    assert not recorder.done
    recorder.begin(2.0)
    recorder.arrived("a", 3.0, 3.0)
    recorder.forget()
    recorder.end()
    assert not recorder.done
    with pytest.raises(ProfileMismatchError, match="few steps"):
        recorder.times()


def test_a_clock_that_goes_back_gives_no_negative_time():
    recorder = BackwardRecorder(["a", "b"], num_warmup=0, num_steps=1)
    recorder.begin(5.0)
    recorder.arrived("b", 4.0, 6.0)
    recorder.arrived("a", 5.5, 6.0)
    recorder.end()
    assert recorder.times() == BackwardTimes({"b": 0.0, "a": 0.0}, 0.0, 1, (0.0,))


@pytest.mark.parametrize(("argument", "value"), [("num_warmup", -1), ("num_steps", 0), ("num_steps", 1.5)])
def test_numbers_of_steps_are_checked(argument, value):
    with pytest.raises(ArgumentError, match=argument):
        BackwardRecorder(["a"], **{argument: value})


def test_ranks_without_times_take_the_others_and_without_any_all_refuse():
    times = BackwardTimes({"b": 1.0, "a": 3.0}, 2.0, 5)
    assert run_lockstep([mean_times(None), mean_times(times)]) == [times, times]
    refused = run_lockstep([mean_times(None), mean_times(None)], keep_errors=True)
    assert all(isinstance(error, ProfileMismatchError) for error in refused)


def test_a_step_is_as_long_as_its_slowest_rank():
    """Each of two ranks is slow in turn: means are alike, and every step takes 1.5 times the mean."""
    one = BackwardTimes({"a": 2.0}, 1.0, 3, (1.0, 3.0, 1.0))
    other = BackwardTimes({"a": 4.0}, 2.0, 3, (3.0, 1.0, 3.0))
    found, _ = run_lockstep([mean_times(one), mean_times(other)])
    assert found == BackwardTimes({"a": 1.5 * 3.0}, 1.5 * 1.5, 3)


def test_ranks_whose_gradients_come_in_different_orders_agree_on_one():
    one = BackwardTimes({"c": 0.0, "b": 1.0, "a": 1.0}, 1.0, 5)
    other = BackwardTimes({"c": 0.0, "a": 1.0, "b": 1.0}, 1.0, 5)
    first, second, third = run_lockstep([mean_times(one), mean_times(other), mean_times(one)])
    assert first == second == third
    assert list(first.backward_seconds) == list(second.backward_seconds) == ["c", "b", "a"]
