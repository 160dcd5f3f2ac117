"""Tables in docs/results.md are what the committed measurements say, and pictures are there."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

pytest.importorskip("mlxtend")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from studies import convergence, feedback, gpt, results, schedules, threshold
from studies.time_to_accuracy import curves as time_to_accuracy

STUDIES = {
    "threshold": (threshold, threshold.table),
    "feedback": (feedback, feedback.table),
    "schedules": (schedules, schedules.table),
    "remedies": (schedules, schedules.remedies_table),
    "convergence": (convergence, convergence.table),
    "gpt": (gpt, gpt.table),
    "time to accuracy": (time_to_accuracy, time_to_accuracy.table),
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_table_is_what_was_measured(name: str) -> None:
    study: ModuleType = STUDIES[name][0]
    measured = results.load(study.FILE)
    assert measured["runs"], f"{study.FILE.name} has no runs"
    document = results.DOCUMENT.read_text()
    assert results.with_table(document, name, STUDIES[name][1](measured)) == document


def test_pictures_that_are_shown_exist() -> None:
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", results.DOCUMENT.read_text())
    assert len(shown) >= 3
    for picture in shown:
        assert (results.DOCUMENT.parent / picture).stat().st_size > 1000, picture


def test_the_sketch_rule_meets_its_target_on_real_gradients() -> None:
    runs = results.load(threshold.FILE)["runs"]
    promised = [name for name in runs if name.endswith((" sketch", "rebalance=paper"))]
    assert len(promised) >= 4
    for name in promised:
        facts = threshold.facts(runs[name])
        assert runs[name]["targets"][-1] >= 10_000
        assert 1 / 1.1 <= facts["factor"] <= 1.1, name
        assert facts["mean"] <= 0.03, name


def test_what_promises_to_converge_does() -> None:
    facts = convergence.summary(results.load(convergence.FILE))
    for row, fact in facts.items():
        if "," not in row and row not in convergence.UNPROMISING:
            assert fact["mean"] >= facts["none"]["mean"] - 0.01, row


def test_a_document_without_a_place_for_the_table() -> None:
    with pytest.raises(ValueError, match="no place for the table 'x'"):
        results.with_table("<!-- x: begin -->\nbut no end", "x", "| |")
    assert results.with_table("<!-- x: begin -->\nold\n<!-- x: end -->!", "x", "new") == (
        "<!-- x: begin -->\nnew\n<!-- x: end -->!"
    )
