"""docs/merging.md and docs/levels.md show what was measured on hosts, and nothing else."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import merging_lib.report

    yield merging_lib.report
    for name in [name for name in sys.modules if name.split(".")[0] == "merging_lib"]:
        del sys.modules[name]


def test_the_tables_are_those_of_the_measurements(report):
    assert report.HOSTS
    for mark, (name, page) in report.HOSTS.items():
        found = json.loads((ROOT / "docs" / "measurements" / name).read_text(encoding="utf-8"))
        (table,) = re.findall(
            rf"<!-- {mark} -->\n(.*?)\n<!-- end -->", page.read_text(encoding="utf-8"), re.DOTALL
        )
        assert table == report.hosts_table(found)
        for row in found["results"]:
            error = row["predicted_seconds"] / row["seconds"]["median"] - 1.0
            assert row["error"] == pytest.approx(error, abs=1e-3)


def test_a_goal_that_was_missed_is_shown_as_missed(report):
    result = {"results": [], "goals": {"speed": {"allowed": 0.03, "found": 0.05, "met": False}}}
    assert "| speed | 3% | +5.0% | **missed** |" in report.hosts_table(result)
