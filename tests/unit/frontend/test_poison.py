"""What the log says of gradients that are not finite."""

from __future__ import annotations

import logging

import pytest

from horovod_sparse.errors import NonFiniteGradientError, NonFiniteSumError
from horovod_sparse.frontend.poison import Poison
from horovod_sparse.telemetry import Telemetry


@pytest.mark.parametrize(
    ("policy", "end"),
    [("zero", "those of ranks [1] are left out of this step"), ("skip", "all ranks skip this step")],
)
def test_the_log_says_what_was_seen_and_what_became_of_it(policy: str, end: str, caplog) -> None:
    """The error's own words would say that no rank applied a step that was applied without the bad rank."""
    poison = Poison(policy, Telemetry())
    errors = [NonFiniteGradientError("fc", {1: "fc.weight"})]
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        assert poison.repeats(errors) if policy == "zero" else poison.skips(errors)
    seen = "the gradient of fc is not finite (rank 1: fc.weight)"
    assert caplog.messages == [f"{seen}; {end}, as on_nonfinite={policy!r} asks (1 so far)"]


def test_a_sum_that_overflows_is_skipped_by_zero_too(caplog) -> None:
    poison = Poison("zero", Telemetry())
    errors = [NonFiniteSumError("fc", {}, "fc.weight")]
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        assert not poison.repeats(errors) and poison.skips(errors)
    assert "No rank applied" not in caplog.text and "fc.weight" in caplog.text
