"""Elastic training in PyTorch, by `horovodrun`: workers that die, and others that join or replace them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from elastic.job import HOSTS, elastic_job, of

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
    ("kills", "ranks"),
    [
        ([KILLS[1], KILLS[15], KILLS[8]], 2),
        pytest.param(KILLS, 2, marks=pytest.mark.nightly),
        # of several survivors one notices after Gloo's time-out only, within which a worker has to start, too
        pytest.param(KILLS[::3], 3, marks=pytest.mark.nightly),
    ],
    ids=["some", "all", "several survive"],
)
def test_ranks_with_local_steps_are_killed(tmp_path, kills, ranks):
    """No hang, survivors are equal after every exchange, and the training ends as undisturbed ones do.

    Where all who hold its state are killed it begins anew, and says so.
    """
    task = {"rounds": len(kills) + 40, "kills": kills}
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
    assert 0 < log.count("what waited in their residuals") <= len(kills)
    undisturbed = [entry["loss"] for entry in of(entries, "undisturbed", rank=0)]
    anew = len({entry["life"] for entry in exchanges}) > 1
    assert anew or ranks > 2
    # each of the undisturbed trainings is a new one in a job that was started again, and says so, too
    assert log.count("begins at step 0") > len(undisturbed) * ranks or not anew
    assert ended[0]["loss"] < 1.5 * max(undisturbed), (ended[0], undisturbed)
