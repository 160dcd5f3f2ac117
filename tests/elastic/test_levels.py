"""Two levels in elastic jobs: hosts of two ranks that join, leave and are replaced, or lose one of two."""

import json
from pathlib import Path
from typing import Any

from elastic.job import HOSTS, elastic_job, of
from elastic.test_torch import WORKER

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
