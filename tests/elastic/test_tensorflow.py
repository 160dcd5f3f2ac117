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


@pytest.mark.parametrize("way", ["graph", pytest.param("eager", marks=pytest.mark.nightly)])
def test_a_gradient_that_is_not_finite_ends_the_job_as_an_error(tmp_path, way):
    """The elastic wrapper swallows errors of the kind of Horovod's own, and the job seemed to be done."""
    task = {"nan": {HOSTS[1]: 3}, "batches": 6, "way": way}
    with elastic_job(tmp_path, WORKER, json.dumps(task)) as job:
        assert job.wait() != 0
    assert not of(job.entries, "ended")
    assert "NonFiniteGradientError" in job.log


@pytest.mark.parametrize(
    ("compression", "way"),
    [
        ("randomk:density=0.2", "keras"),
        ("exdyna:density=0.2", "stock"),
        pytest.param("randomk:density=0.2", "graph", marks=pytest.mark.nightly),
        pytest.param("exdyna:density=0.2", "eager", marks=pytest.mark.nightly),
        pytest.param("randomk:density=0.2", "stock", marks=pytest.mark.nightly),
    ],
)
def test_a_worker_is_replaced_at_the_same_size(tmp_path, compression, way):
    """The one that joins has done no step, and its rank and the size are those of the one that is gone."""
    task = {"compression": compression, "way": way, "batches": 9, "killed": {HOSTS[1]: 4}}
    with elastic_job(tmp_path, WORKER, json.dumps(task), least=2) as job:
        job.wait_for(lambda entries: bool(of(entries, "dies")))
        job.set_hosts([HOSTS[0], HOSTS[2]])
        assert job.wait() == 0, job.log
    assert len(of(job.entries, "ended", value="finished")) == 2
    agree(job.entries)
    if way != "stock":  # which does not say where it stands
        for entry in of(job.entries, "batch"):
            assert (entry["step"], entry["states"]) == (entry["batch"], [entry["batch"]])


@pytest.mark.parametrize(
    "compression", ["spardl:density=0.2", pytest.param("topk:density=0.2", marks=pytest.mark.nightly)]
)
def test_ranks_go_and_come(tmp_path, compression):
    """2, 1, 2 and 3 ranks; functions are traced once on the rank that survives and is there all the time."""
    task = {"compression": compression, "slices": True, "batches": 12}
    task |= {"killed": {HOSTS[1]: 3}, "until": {"6": 2, "9": 3}}
    with elastic_job(tmp_path, WORKER, json.dumps(task)) as job:
        job.wait_for(lambda entries: bool(of(entries, "batch", batch=6, size=1)))
        job.set_hosts([HOSTS[0], HOSTS[2]])
        job.wait_for(lambda entries: bool(of(entries, "batch", batch=9, size=2)))
        job.set_hosts([HOSTS[0], HOSTS[2], HOSTS[3]])
        assert job.wait() == 0, job.log
    assert len(of(job.entries, "ended", value="finished")) == 3
    agree(job.entries)
    # row 3 of the table gets a gradient of 1 from every rank, so its average, too
    for entry in of(job.entries, "batch"):
        assert (entry["step"], entry["states"]) == (entry["batch"], [entry["batch"]])
        assert entry["table"][3] == pytest.approx([-0.1 * entry["batch"]] * 2, rel=1e-5)
