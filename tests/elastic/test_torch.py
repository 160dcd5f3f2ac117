"""Elastic training in PyTorch: workers that die, join or are replaced, alone or by hosts of two."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.job import HOSTS, elastic_job, of
from support.jobs import ran
from support.sampling import rest_nightly

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
    task = {"trained": ALL, "killed": {"1": 5}, "batches": 9, "until": {"5": 2}}
    with elastic_job(tmp_path, WORKER, json.dumps(task), least=2, most=2) as job:
        job.set_hosts(HOSTS[:3])  # more than it may use at once
        assert job.wait() == 0, job.log
    lawful(job.entries, 2)
    assert of(job.entries, "batch", host=HOSTS[2])


def test_hosts_join_and_leave_and_one_of_two_ranks_is_refused(tmp_path: Path) -> None:
    """Nothing is lost of what survivors hold; at unequal hosts all ranks end with the error's name.

    It is the first host that is lost: the others' ranks are renumbered, and no shard stays where it was.
    """
    trained = [f"own {name}:density=0.2" for name in ("topk", "exdyna")]
    task = {"trained": trained, "batches": 100, "until": {"3": 6, "8": 4}, "killed": {"0": 6}}
    task["more"] = {"levels": "host"}
    with elastic_job(tmp_path, WORKER, json.dumps(task), least=2, most=6, each=2) as job:
        job.wait_for(lambda entries: len(of(entries, "batch", batch=3)) >= 4)
        job.set_hosts(HOSTS[:3])
        job.wait_for(lambda entries: len(of(entries, "batch", batch=10, size=4)) >= 4)
        # in the order of ranks, which is not that of their names
        of_ranks = {entry["rank"]: entry["host"] for entry in of(job.entries, "batch", batch=10, size=4)}
        left = list(dict.fromkeys(of_ranks[rank] for rank in range(4)))
        job.set_hosts(left, **{left[1]: 1})
        assert job.wait() != 0
        entries, log = job.entries, job.log
    assert "UnsupportedError: two levels need as many ranks on every host" in log
    steps = [(entry["size"], step) for entry in of(entries, "batch") for step in entry["steps"]]
    for size, step in steps:
        assert step["hosts"] == [[0, 1], [2, 3], [4, 5]][: size // 2] and step["lost"] < 1e-5, (size, step)
    assert {size for size, _ in steps} == {4, 6}
    assert max(step["held"] for _, step in steps) > 0
    after = of(entries, "batch", batch=10, size=4)[-4:]
    for which in range(len(trained)):
        assert len({entry["steps"][which]["digest"] for entry in after}) == 1


DDP_WORKER = Path(__file__).with_name("ddp_worker.py")
#: one host, and a rendezvous that takes workers in again after a restart
OPTIONS = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
#: a store of its own for every attempt: PyTorch 2.13 leaves addresses of the dead in the launcher's, which
#: init_process_group then tries to reach
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.parametrize(("kill", "first"), rest_nightly([(0, 8), (1, 8), (2, 8), (3, 12)], [(2, 8)]))
def test_a_rank_is_killed_in_a_save_and_all_go_on_bit_for_bit(tmp_path: Path, kill: int, first: int) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    ran(torchrun, *OPTIONS, DDP_WORKER, tmp_path, str(kill), **ENVIRONMENT)
    assert (tmp_path / "ended").exists()
    names = ("whole-0", "whole-1", "restarted-0", "restarted-1")
    ends = [torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in names]
    assert [begun for begun, _ in ends] == [0, 0, first, first]
    for weights in zip(*(state.values() for _, state in ends), strict=True):
        assert all(torch.equal(weight, weights[0]) for weight in weights)
