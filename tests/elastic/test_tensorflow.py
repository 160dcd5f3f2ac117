"""Elastic training in TensorFlow, by `horovodrun`: workers that die, and others that join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic.job import HOSTS, elastic_job

WORKER = Path(__file__).with_name("tf_worker.py")


def of(entries: list[dict[str, Any]], what: str, **facts: Any) -> list[dict[str, Any]]:
    """Entries of a kind."""
    return [e for e in entries if e["what"] == what and all(e[name] == facts[name] for name in facts)]


def agree(entries: list[dict[str, Any]]) -> None:
    """All ranks had the same variables after every batch."""
    done: dict[int, set[str]] = {}
    for entry in of(entries, "batch"):
        done.setdefault(entry["batch"], set()).add(entry["digest"])
    # a batch may be done twice: the ranks that survive a failure begin it again
    assert all(len(digests) == 1 for digests in done.values()), done


@pytest.mark.parametrize("way", ["graph", "eager"])
def test_a_gradient_that_is_not_finite_ends_the_job_as_an_error(tmp_path, way):
    """The elastic wrapper swallows errors of the kind of Horovod's own, and the job seemed to be done."""
    task = {"nan": {HOSTS[1]: 3}, "batches": 6, "way": way}
    with elastic_job(tmp_path, WORKER, json.dumps(task)) as job:
        assert job.wait() != 0
    assert not of(job.entries, "ended")
    assert "NonFiniteGradientError" in job.log


def test_survivors_of_a_killed_worker_finish(tmp_path):
    task = {"killed": {HOSTS[1]: 4}, "batches": 8}
    with elastic_job(tmp_path, WORKER, json.dumps(task)) as job:
        assert job.wait() == 0, job.log
    [ended] = of(job.entries, "ended")
    assert ended["value"] == "finished"
    agree(job.entries)
