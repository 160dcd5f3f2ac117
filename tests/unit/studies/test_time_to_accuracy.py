"""Seconds to a score: composed by hand, on made images, and drawn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mlxtend")
pytest.importorskip("matplotlib")

from cifar10_resnet import load
from studies.time_to_accuracy import curves, images, picture
from studies.time_to_accuracy.trainings import digits_training, images_training, text_training


def run(*scores: float, num_bytes: float = 4000.0, diverged: bool = False) -> dict[str, Any]:
    curve = [[10 * number, score] for number, score in enumerate(scores)]
    return {"curve": curve, "bytes_per_step": num_bytes, "diverged": diverged, "num_parameters": 1000}


@pytest.fixture
def result() -> dict[str, Any]:
    timed = {"median": 0.1, "low": 0.1, "high": 0.1}
    methods = {"dense": timed, "dense, DDP": {**timed, "median": 0.05}, "topk": {**timed, "median": 0.02}}
    return {
        "rates": ["1gbit", "10gbit"],
        "methods": list(methods),
        "runs": {
            "digits/dense/seed 0": run(0.0, 0.80, 0.90),
            "digits/dense/seed 1": run(0.0, 0.88, 0.96),
            # their mean is 0.92 at step 20: the target is what dense training ends with, less a point
            "digits/topk/seed 0": run(0.0, 0.72, 0.98, num_bytes=100.0),
            "gpt/dense/seed 0": run(8.0, 4.0, 3.0),
            "gpt/topk/seed 0": run(8.0, 5.0, 3.6),
        },
        "timings": {"digits/1gbit": {"methods": methods}, "gpt/1gbit": {"methods": methods}},
    }


def test_seconds_are_steps_times_the_median_iteration(result: dict[str, Any]) -> None:
    assert curves.targets_of(result, "digits") == pytest.approx([0.88, 0.92])
    # dense: 0.84 at step 10, 0.93 at step 20; top-k: 0.72 and 0.98
    dense = 0.1 * (10 + 10 * 0.08 / 0.09)
    topk = 0.02 * (10 + 10 * 0.20 / 0.26)
    assert curves.seconds_to(result, "digits", "1gbit", "dense", 0.92) == pytest.approx(dense)
    assert curves.seconds_to(result, "digits", "1gbit", "topk", 0.92) == pytest.approx(topk)
    # the same sums as dense, at iterations of its own
    assert curves.seconds_to(result, "digits", "1gbit", "dense, DDP", 0.92) == pytest.approx(dense / 2)
    assert curves.seconds_to(result, "digits", "10gbit", "topk", 0.92) is None  # not timed


def test_a_score_that_falls_is_reached_from_above(result: dict[str, Any]) -> None:
    assert curves.targets_of(result, "gpt") == pytest.approx([3.5, 3.1])
    assert curves.seconds_to(result, "gpt", "1gbit", "dense", 3.5) == pytest.approx(1.5)
    assert curves.seconds_to(result, "gpt", "1gbit", "topk", 3.5) is None


def test_tables_say_what_was_reached_what_was_not_and_what_is_missing(result: dict[str, Any]) -> None:
    far, near, behind = curves.table(result).split("\n\n")
    assert far.splitlines()[2] == "| dense | 1.4 (1x) | - | 1.5 (1x) | - |"
    assert near.splitlines()[2:] == [
        "| dense | 1.9 (1x) | - | 1.9 (1x) | - |",
        "| dense, DDP | 0.9 (2x) | - | 0.9 (2x) | - |",
        "| topk | 0.4 (5.3x) | - | not reached | - |",
    ]
    last = behind.splitlines()[-1]
    assert last == "| topk | 98.0% (1) | 0.1 | 20 | - | 3.60 (1) | 4.0 | 20 | - |"


def test_what_diverged_is_in_no_mean_but_is_told(result: dict[str, Any]) -> None:
    result = copy.deepcopy(result)
    result["runs"]["digits/topk/seed 1"] = run(0.0, diverged=True)
    assert curves.mean_curve(curves.seeds_of(result, "digits", "topk"))[-1] == (20, 0.98)
    assert "98.0% (1 of 2)" in curves.table(result)


def test_it_is_drawn_with_what_is_there(result: dict[str, Any], tmp_path: Path) -> None:
    picture.draw(result, tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").stat().st_size > 10_000


def test_made_images_are_read_as_cifar_and_drawn_alike_on_every_machine(tmp_path: Path) -> None:
    for name in ("one", "two"):
        images.make_images(tmp_path / name, num_train=100, num_test=20)
    found = load(tmp_path / "one", images.TRAIN_FILES)
    assert found[0].shape == (100, 3, 32, 32) and found[0].dtype == torch.uint8
    assert np.bincount(found[1]).tolist() == [10] * 10
    assert torch.equal(found[0], load(tmp_path / "two", images.TRAIN_FILES)[0])
    assert not torch.equal(found[0][:20], load(tmp_path / "one", [images.TEST_FILE])[0])
    # two images of a class differ, and less than those of two classes
    first, second = (found[0][found[1] == label].float() for label in (0, 3))
    assert (
        10 < (first.mean(0) - first[:5].mean(0)).abs().mean() < (first.mean(0) - second.mean(0)).abs().mean()
    )


def test_ranks_share_the_test_data_and_train_on_other_samples(tmp_path: Path) -> None:
    images.make_images(tmp_path, num_train=100, num_test=20)
    for training in (
        digits_training(hidden=4, batch_size=2),
        images_training(tmp_path, batch_size=2, num_test=20),
        text_training(layers=1, width=8, length=8, num_test=10),
    ):
        torch.manual_seed(0)
        model = training.make_model().eval()
        whole, shares = training.test(model, 0, 1), [training.test(model, rank, 2) for rank in range(2)]
        model.eval()
        assert sum(count for _, count in shares) == whole[1]
        assert sum(total for total, _ in shares) == pytest.approx(whole[0], rel=1e-4)
        first, other, again = (next(training.batches(rank, 2, 0)) for rank in (0, 1, 0))
        assert not torch.equal(first[0], other[0])
        assert torch.equal(first[1], again[1])


def test_a_rate_rises_where_it_is_told_to_and_ends_at_nothing() -> None:
    training = text_training(layers=1, width=8, length=8, num_test=10)
    assert training.rate_at(0, 300) == pytest.approx(1 / 30)
    assert training.rate_at(300, 300) == pytest.approx(0.0, abs=1e-12)
    assert digits_training(hidden=4).rate_at(0, 300) == 1.0
