"""The studies behind docs/papers, at toy sizes; the committed numbers, drawn and put into tables."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("mlxtend")

from studies.papers import counts, pictures, tables, trainings

TOY = {**counts.SETTING, "num_elements": 30_000, "sizes": [4, 5], "team_sizes": [6]}


def test_exdyna_on_ranks_scores_before_the_first_step_and_after_the_last() -> None:
    setting = {**trainings.RANKS, "sizes": [2], "samples": 4, "width": 4, "num_steps": 5, "warmup_steps": 1}
    result: dict = {}
    assert len(list(trainings.measure_ranks(result, {**setting, "score_every": 3}))) == 2
    assert list(result["runs"]) == ["dense", "exdyna/2"]
    run = result["runs"]["exdyna/2"]
    assert run["steps"] == [0, 3, 5] and len(run["scores"]) == 3 and len(run["losses"]) == 5
    assert run["scores"][0] == result["runs"]["dense"]["scores"][0]  # the same start, and no step yet
    assert run["union"] < 0.5 and result["runs"]["dense"]["union"] == 1.0
    assert not list(trainings.measure_ranks(result, setting))


def test_teams_tell_what_goes_between_them() -> None:
    setting = {**trainings.TEAMS, "size": 6, "teams": [2, 3], "modes": ["global"], "seeds": [1]}
    setting |= {"batch_size": 2, "width": 4, "num_steps": 4}
    result: dict = {}
    assert len(list(trainings.measure_teams(result, setting))) == 2
    pairs, triple = (result["runs"][f"{teams}/global/seed 1"] for teams in (2, 3))
    assert "after" not in pairs  # R-SAG has no such union
    assert len(triple["after"]) == len(triple["sent"]) == 4
    for sent, after in zip(triple["sent"], triple["after"], strict=True):
        assert triple["quota"] / 3 - 1 <= sent <= after <= 3 * sent


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


def test_committed_numbers_are_in_the_pages_and_can_be_drawn() -> None:
    for page, name, file, make in tables.FILLED:
        text = make(tables.results.load(file))
        assert f"<!-- {name}: begin -->\n{text}\n<!-- {name}: end -->" in (tables.DOCS / page).read_text(
            "utf-8"
        )
    for measurement, make in pictures.DRAWN.values():
        assert make(pictures.measured(measurement)).axes


def test_every_picture_is_shown() -> None:
    pages = "".join(page.read_text("utf-8") for page in (tables.DOCS / "papers").glob("*.md"))
    drawn = {path.stem for path in pictures.FOLDER.glob("*.png")}
    assert drawn == set(pictures.DRAWN)
    assert all(f"](../pictures/papers/{name}.png)" in pages for name in drawn)
