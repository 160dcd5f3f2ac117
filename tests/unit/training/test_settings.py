"""What a user may say beside the sparsifier: one declaration, which every front end takes its share of."""

import dataclasses

import pytest

from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.training.settings import (
    CommonOptions,
    Settings,
    SettingsOptions,
    refuse_without_sparsifier,
)


def test_editors_show_what_there_is() -> None:
    assert set(SettingsOptions.__annotations__) == {field.name for field in dataclasses.fields(Settings)}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("lvels", "unknown argument of a front end 'lvels': did you mean levels? the known ones are"),
        ("op", "unknown argument of a front end 'op': the known ones are"),
        ("proces_set", "did you mean process_set?"),
        ("merging", "it is for other front ends. the known ones are check_every, levels, on_drift"),
        ("network_share", "it is for PyTorch; `horovod-sparse plan --network-share` names a density"),
    ],
)
def test_a_front_end_refuses_what_it_does_not_take(option: str, words: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        Settings.of({option: 1}, "a front end", CommonOptions, ["process_set"])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"synchronize_at": "now"},
        {"max_grad_norm": 0.0},
        {"deadline_seconds": -1},
        {"on_nonfinite": "no"},
        {"check_every": 1.5},
        {"on_drift": "no"},
        {"levels": "no"},
    ],
)
def test_values_are_checked_and_named(options: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        Settings(**options)


def test_the_environment_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SPARSE_CHECK_EVERY", "7")
    monkeypatch.setenv("HOROVOD_SPARSE_ON_DRIFT", "warn")
    monkeypatch.setenv("HOROVOD_SPARSE_DEADLINE_SECONDS", "20")
    made = Settings()
    assert (made.check_every, made.on_drift, made.deadline_seconds) == (7, "warn", 20.0)
    assert dataclasses.replace(made, levels="host").check_every == 7
    assert Settings(deadline_seconds=0).deadline_seconds == 0


def test_without_a_sparsifier_most_of_it_is_refused() -> None:
    refuse_without_sparsifier({"levels": "auto", "on_nonfinite": "raise", "plan": None}, "none")
    with pytest.raises(ArgumentError, match="a sparsifier, or leave levels, check_every out"):
        refuse_without_sparsifier({"levels": "host", "check_every": 5}, "none")
