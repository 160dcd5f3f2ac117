"""The studies behind docs/papers.md, at toy sizes; the committed numbers, drawn."""

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("mlxtend")

from studies.papers import counts, pictures

TOY = {**counts.SETTING, "num_elements": 30_000, "sizes": [4, 5], "team_sizes": [6]}


def test_counts_are_the_formulas() -> None:
    """Top-k receives 2 (P - 1) words by k; one team 4 (P - 1) / P; B-SAG lies within the paper's range."""
    sizes = counts.by_size(TOY)
    assert sizes["gtopk"][1] is None and sizes["gtopk"][0]["rounds"] == 4
    assert [row["received"] for row in sizes["topk"]] == pytest.approx([6.0, 8.0], rel=0.12)
    found = counts.by_teams(TOY)["6"]
    assert list(found) == ["1", "R2", "B2", "B3", "B6"]
    for row in found.values():
        assert row["rounds"] == row["formula_rounds"]
        assert 0.9 * row["least"] < row["received"] < 1.2 * row["most"]
        bytes_seconds = 4 * row["received"] * TOY["density"] * TOY["scaled_to"] * TOY["beta_seconds"]
        assert row["seconds"] == pytest.approx(row["rounds"] * TOY["alpha_seconds"] + bytes_seconds, rel=0.1)


def test_dense_merging_is_no_worse_than_none_and_one_bucket() -> None:
    found = counts.dense_merging("lstm_ptb")
    assert 1 < found["mgwfbp"]["buckets"] < found["wfbp"]["buckets"]
    assert found["mgwfbp"]["seconds"] <= min(found["wfbp"]["seconds"], found["dense, one bucket"]["seconds"])


def test_committed_numbers_can_be_drawn() -> None:
    for measurement, make in pictures.DRAWN.values():
        assert make(pictures.measured(measurement)).axes
