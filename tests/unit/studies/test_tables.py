"""What the committed measurements promise."""

import pytest

pytest.importorskip("mlxtend")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from studies import convergence, results, threshold


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
