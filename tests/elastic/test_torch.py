"""Elastic training in PyTorch: workers that die, join or are replaced, alone or by hosts of two."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.job import HOSTS, elastic_job, of
from support.jobs import ran
from support.sampling import rest_nightly

WORKER, LOCAL_WORKER = (Path(__file__).with_name(name) for name in ("torch_worker.py", "local_worker.py"))


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
    task = {"trained": ALL, "killed": [(1, 5, "before")], "batches": 9, "until": {"5": 2}}
    with elastic_job(tmp_path, WORKER, json.dumps(task), least=2, most=2) as job:
        job.set_hosts(HOSTS[:3])  # more than it may use at once
        assert job.wait() == 0, job.log
    lawful(job.entries, 2)
    assert of(job.entries, "batch", host=HOSTS[2])


#: of `local_worker`: in a round, in all of an exchange, and in the agreement after the kill before
KILLS = [[0, -1, 0], *([3, count, 0] for count in range(5)), [1, -1, 0]]
KILLS += [[-1, count, 0] for count in (0, 2, 4, 5, 6, 7)]
KILLS += [*([3, 1, milliseconds] for milliseconds in (0.2, 0.5, 1, 2, 5)), [2, -1, 0], [-1, 6, 1]]
SPELLINGS = ["".join(letters) for letters in itertools.product(*((one, one.upper()) for one in "localhost"))]


@pytest.mark.parametrize(
    ("kills", "ranks", "delay"),
    [
        ([KILLS[1], KILLS[15], KILLS[8]], 2, 1),  # an exchange is in flight
        pytest.param(KILLS, 2, 0, marks=pytest.mark.nightly),
        # of several survivors one notices after Gloo's time-out only, within which a worker has to start, too
        pytest.param(KILLS[::3], 3, 0, marks=pytest.mark.nightly),
    ],
    ids=["some", "all", "several survive"],
)
def test_ranks_with_local_steps_are_killed(tmp_path, kills, ranks, delay):
    """No hang, survivors are equal after every exchange, and the training ends as undisturbed ones do.

    Where all who hold its state are killed it begins anew, and says so.
    """
    task = {"rounds": len(kills) + 40, "delay": delay, "kills": kills}
    hosts = SPELLINGS[: len(kills) + ranks]
    with elastic_job(
        tmp_path,
        LOCAL_WORKER,
        json.dumps(task),
        hosts=hosts[:ranks],
        least=ranks,
        most=ranks,
        HOROVOD_GLOO_TIMEOUT_SECONDS="120",
    ) as job:
        job.set_hosts(hosts)
        for number in range(len(kills)):
            job.wait_for(lambda entries, number=number: len(of(entries, "dies")) > number, 300.0)
        assert job.wait(900.0) == 0, job.log
        entries, log = job.entries, job.log
    assert [entry["number"] for entry in of(entries, "dies")] == list(range(len(kills)))
    exchanges = of(entries, "exchange")
    last = {entry["pid"]: entry for entry in exchanges}
    done: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for entry in exchanges:  # who was killed behind an exchange may have done it alone: others did it again
        if entry is not last[entry["pid"]] or entry["round"] == task["rounds"]:
            done.setdefault((entry["life"], entry["round"]), []).append(entry)
    assert all(len({entry["digest"] for entry in each}) == 1 for each in done.values())
    ended = done[exchanges[-1]["life"], task["rounds"]]
    assert len(ended) == ranks
    assert 0 < log.count("their residuals are lost") <= len(kills)
    undisturbed = [entry["loss"] for entry in of(entries, "undisturbed", rank=0)]
    anew = len({entry["life"] for entry in exchanges}) > 1
    assert anew or ranks > 2
    # each of the undisturbed trainings is a new one in a job that was started again, and says so, too
    assert log.count("begins at step 0") > len(undisturbed) * ranks or not anew
    assert ended[0]["loss"] < 1.5 * max(undisturbed), (ended[0], undisturbed)


THREE = [[0, 1], [2, 3], [4, 5]]


def hosts_in(entries: list[dict[str, Any]], batch: int, size: int = 4) -> list[str]:
    """The hosts that did a batch last, in the order of their ranks, which is not that of their names."""
    of_ranks = {entry["rank"]: entry["host"] for entry in of(entries, "batch", batch=batch, size=size)}
    return list(dict.fromkeys(of_ranks[rank] for rank in sorted(of_ranks)))


def test_hosts_join_and_leave_and_one_of_two_ranks_is_refused(tmp_path: Path) -> None:
    """Nothing is lost of what survivors hold; at unequal hosts all ranks end with the error's name.

    It is the first host that is lost: the others' ranks are renumbered, and no shard stays where it was.
    """
    trained = [f"own {name}:density=0.2" for name in ("topk", "exdyna")]
    task = {"trained": trained, "batches": 100, "until": {"3": 6, "8": 4}, "killed": [(0, 6, "before")]}
    task["more"] = {"levels": "host"}
    with elastic_job(tmp_path, WORKER, json.dumps(task), least=2, most=6, each=2) as job:
        job.wait_for(lambda entries: len(of(entries, "batch", batch=3)) >= 4)
        job.set_hosts(HOSTS[:3])
        job.wait_for(lambda entries: len(of(entries, "batch", batch=10, size=4)) >= 4)
        left = hosts_in(job.entries, 10)
        job.set_hosts(left, **{left[1]: 1})
        assert job.wait() != 0
        entries, log = job.entries, job.log
    assert "UnsupportedError: two levels need as many ranks on every host" in log
    steps = [(entry["size"], step) for entry in of(entries, "batch") for step in entry["steps"]]
    for size, step in steps:
        assert step["hosts"] == THREE[: size // 2] and step["lost"] < 1e-5, (size, step)
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
