"""What the log says of gradients that are not finite."""

from __future__ import annotations

import logging

import pytest

from horovod_sparse.errors import (
    EditedGradientError,
    NonFiniteGradientError,
    NonFiniteSumError,
    UnsupportedError,
)
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.training.outcome import NonFinitePolicy, Outcome, Verdict


@pytest.mark.parametrize(
    ("policy", "end", "outcome"),
    [
        ("zero", "those of ranks [1] are left out of this step", Outcome.AGAIN),
        ("skip", "all ranks skip this step", Outcome.SKIPPED),
    ],
)
def test_the_log_says_what_was_seen_and_what_became_of_it(
    policy: str, end: str, outcome: Outcome, caplog
) -> None:
    """The error's own words would say that no rank applied a step that was applied without the bad rank."""
    rule = NonFinitePolicy(policy, Telemetry())
    errors = [NonFiniteGradientError("fc", {1: "fc.weight"})]
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        assert rule.judge(errors, [0], again=True).outcome is outcome
    seen = "the gradient of fc is not finite (rank 1: fc.weight)"
    assert caplog.messages == [f"{seen}; {end}, as on_nonfinite={policy!r} asks (1 so far)"]


def test_a_sum_that_overflows_is_skipped_by_zero_too(caplog) -> None:
    rule = NonFinitePolicy("zero", Telemetry())
    errors = [NonFiniteSumError("fc", {}, "fc.weight")]
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        verdict = rule.judge(errors, [0], again=True)
    assert verdict.outcome is Outcome.SKIPPED and verdict.drop
    assert "No rank applied" not in caplog.text and "fc.weight" in caplog.text


def test_what_becomes_of_a_step() -> None:
    bad, edited = NonFiniteGradientError("fc", {1: "w"}), EditedGradientError("fc", {0: "w"})
    own, rule = UnsupportedError("of this rank"), NonFinitePolicy("raise", Telemetry())
    assert rule.judge([], [0]).outcome is Outcome.APPLIED
    assert rule.judge([bad], [1]) == Verdict(Outcome.RAISE, bad, True)
    assert rule.judge([bad], [0], scaled=True) == Verdict(Outcome.OVERFLOW, bad, True)
    assert rule.judge([bad, edited], [0], scaled=True) == Verdict(Outcome.RAISE, edited, False)
    assert rule.judge([bad, edited, own], [0]).error is own
    assert rule.judge([], [0], failure=own) == Verdict(Outcome.RAISE, own, False)
    assert NonFinitePolicy("skip", Telemetry()).judge([bad, own], [0]).outcome is Outcome.RAISE
