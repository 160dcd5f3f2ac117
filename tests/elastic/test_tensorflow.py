"""Elastic training in TensorFlow, by `horovodrun`: workers that die, and others that join."""

import json
from pathlib import Path
from typing import Any

import pytest

from elastic.job import HOSTS, elastic_job, of

WORKER = Path(__file__).with_name("tf_worker.py")
TRAINED = ["graph topk:density=0.2", "keras randomk:density=0.2", "stock exdyna:density=0.2"]


def lawful(entries: list[dict[str, Any]]) -> None:
    """All ranks had the same variables after every batch, and the same steps behind them."""
    done: dict[tuple[int, str], set[str]] = {}
    for entry in of(entries, "batch"):
        for facts in entry["steps"]:
            done.setdefault((entry["batch"], facts["way"]), set()).add(facts["digest"])
            assert (facts["step"], facts["states"]) == (entry["batch"], [entry["batch"]])
            if "table" in facts:  # an average of ones
                assert facts["table"][3] == pytest.approx([-0.1 * entry["batch"]] * 2, rel=1e-5)
    # a batch may be done twice: the ranks that survive a failure begin it again
    assert all(len(digests) == 1 for digests in done.values()), done


def test_a_worker_is_replaced_another_joins_and_a_gradient_that_is_not_finite_ends_the_job(tmp_path):
    """The one in the other's place has done no step, and its rank and the size are those of who is gone.

    The elastic wrapper swallows errors of the kind of Horovod's own, and the job seemed to be done.
    """
    task = {"trained": TRAINED, "batches": 12, "killed": {"1": 4}}
    task |= {"until": {"8": 3}, "nan": {HOSTS[3]: 10}}
    with elastic_job(tmp_path, WORKER, json.dumps(task), least=2) as job:
        lost = job.until("dies")["host"]
        left = [host for host in HOSTS[:3] if host != lost]
        job.set_hosts(left)
        job.until("batch", batch=8, size=2)
        job.set_hosts([*left, HOSTS[3]])
        assert job.wait() != 0
        entries, log = job.entries, job.log
    assert len(of(entries, "batch", batch=10, size=3)) == 3
    lawful(entries)
    assert not of(entries, "ended")
    assert "NonFiniteGradientError" in log
