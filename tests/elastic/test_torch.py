"""Elastic training in PyTorch, by `horovodrun`: workers that die, and others that join or replace them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elastic.job import HOSTS, elastic_job, of

WORKER = Path(__file__).with_name("torch_worker.py")


def lawful(entries: list[dict[str, Any]], ranks: int) -> None:
    """Weights were the same on all ranks, nothing was lost or applied twice, and all have finished."""
    assert len(of(entries, "ended", value="finished", size=ranks)) == ranks
    weights: dict[tuple[str, int], list[str]] = {}
    for entry in of(entries, "batch"):
        for step in entry["steps"]:
            assert step["lost"] < 1e-5, entry
            weights.setdefault((step["what"], entry["batch"]), []).append(step["digest"])
    # what was done before a failure may have been done otherwise: what was done last counts
    assert {key: digests for key, digests in weights.items() if len(set(digests[-ranks:])) > 1} == {}


ALGORITHMS = ["exdyna:density=0.1", "micro:density=0.1", "randomk:density=0.3", "cltk:density=0.1"]
ALGORITHMS += ["oktopk:density=0.1", "spardl:density=0.1"]
ALL = [*(f"own {name}" for name in ALGORITHMS), *(f"stock {name}" for name in ALGORITHMS[::2])]


def test_a_worker_is_replaced_at_an_unchanged_size(tmp_path):
    """The one that stays keeps its rank, too: nothing it sees by itself has changed."""
    task = {"trained": ALL, "killed": [(1, 5, "before")], "batches": 9, "until": {"5": 2}}
    with elastic_job(tmp_path, WORKER, json.dumps(task), least=2, most=2) as job:
        job.set_hosts(HOSTS[:3])  # more than it may use at once
        assert job.wait() == 0, job.log
    lawful(job.entries, 2)
    assert of(job.entries, "batch", host=HOSTS[2])
