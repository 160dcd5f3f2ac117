"""What a user may say beside the sparsifier: one declaration, which every front end takes its share of."""

import dataclasses
import logging

import pytest

from horovod_sparse import errors
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.training import settings
from horovod_sparse.training.collective_errors import NonFinitePolicy, Outcome, Verdict


def test_editors_show_every_setting() -> None:
    names = {field.name for field in dataclasses.fields(settings.Settings)}
    assert set(settings.SettingsOptions.__annotations__) == names


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("lvels", "unknown argument of a front end 'lvels': did you mean levels? the known ones are"),
        ("op", "unknown argument of a front end 'op': the known ones are"),
        ("proces_set", "did you mean process_set?"),
        ("merging", "it is for other front ends. the known ones are check_every, levels, on_nonfinite"),
    ],
)
def test_a_front_end_refuses_what_it_does_not_take(option: str, words: str) -> None:
    with pytest.raises(errors.UnknownNameError) as caught:
        settings.Settings.of({option: 1}, "a front end", settings.CommonOptions, ["process_set"])
    assert words in str(caught.value)


def test_what_only_a_sparsifier_needs_is_refused_without_one() -> None:
    settings.raise_if_no_sparsifier({"levels": "flat", "on_nonfinite": "raise", "plan": None}, "none")
    with pytest.raises(errors.ArgumentError, match="a sparsifier, or leave levels, check_every out"):
        settings.raise_if_no_sparsifier({"levels": "host", "check_every": 5}, "none")


WRONG = {"synchronize_at": "now", "max_grad_norm": 0.0, "deadline_seconds": -1}
WRONG |= {"on_nonfinite": "zero", "check_every": 1.5, "levels": "no"}


@pytest.mark.parametrize(("option", "wrong"), WRONG.items())
def test_values_are_checked_and_named(option: str, wrong: object) -> None:
    with pytest.raises(errors.ArgumentError, match=option):
        settings.Settings(**{option: wrong})


def test_the_environment_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SPARSE_CHECK_EVERY", "7")
    monkeypatch.setenv("HOROVOD_SPARSE_DEADLINE_SECONDS", "20")
    made = settings.Settings()
    assert (made.check_every, made.deadline_seconds) == (7, 20.0)
    assert dataclasses.replace(made, levels="host").check_every == 7
    assert settings.Settings(deadline_seconds=0).deadline_seconds == 0


WEIGHT = "fc.weight"


@pytest.mark.parametrize(
    "error", [errors.NonFiniteGradientError("fc", {1: WEIGHT}), errors.NonFiniteSumError("fc", {}, WEIGHT)]
)
def test_the_log_says_what_was_seen_and_that_the_step_is_skipped(error, caplog) -> None:
    rule = NonFinitePolicy("skip", Telemetry())
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        assert rule.judge([error]) == Verdict(Outcome.SKIPPED, error, True)
    (told,) = caplog.messages
    assert told == f"{error.finding}; all ranks skip this step, as on_nonfinite='skip' asks (1 so far)"
    assert "No rank applied" not in told and "fc.weight" in told


def test_errors_decide_whether_a_step_is_applied_skipped_or_raised() -> None:
    bad, edited = errors.NonFiniteGradientError("fc", {1: "w"}), errors.EditedGradientError("fc", {0: "w"})
    own, rule = errors.UnsupportedError("of this rank"), NonFinitePolicy("raise", Telemetry())
    assert rule.judge([]).outcome is Outcome.APPLIED
    assert rule.judge([bad]) == Verdict(Outcome.RAISE, bad, True)
    assert rule.judge([bad], scaled=True) == Verdict(Outcome.OVERFLOW, bad, True)
    assert rule.judge([bad, edited], scaled=True) == Verdict(Outcome.RAISE, edited, False)
    assert rule.judge([bad, edited, own]).error is own
    assert NonFinitePolicy("skip", Telemetry()).judge([bad, own]).outcome is Outcome.RAISE
