"""One rank of `scripts/bench rounds`: small collectives, one or several at once, and their own stamps."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ranks
from benchmarks.common.samples import Clocks
from benchmarks.rounds.account import Stamps, account
from horovod_sparse.collectives import AllGather, AllReduce, Synchronization
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.driver import HorovodDriver

_NUM_WARMUP = 5
#: between two steps: Horovod's cycles must not stand where the step before has left them
_LONGEST_PAUSE = 3e-3


class Steps:
    """Steps of some collectives that are started together and waited for, as buckets are.

    Args:
        name: of the variant, and of its collectives.
        kind: "allgather" or "allreduce".
        num_buckets: collectives in a step.
        words: that a rank puts into each.
        changing: whether that changes with every step.
    """

    def __init__(self, name: str, kind: str, num_buckets: int, words: int, changing: bool) -> None:
        self.name, self._kind, self._changing = name, kind, changing
        self._num_buckets, self._words = num_buckets, words
        self.stamps: list[Stamps] = []
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.own_cpu: list[float] = []

    def take(self, driver: HorovodDriver, number: int) -> None:
        """One step; those below 0 do not count."""
        words = self._words + (7 * number % 61 if self._changing else 0)
        indices, values = np.ones(words, np.int32), np.ones(words, np.float32)
        noticed: dict[str, float] = {}

        def one(name: str) -> Synchronization[None]:
            yield AllGather(indices) if self._kind == "allgather" else AllReduce(values)
            noticed[name] = time.perf_counter()

        before = Clocks.now()
        tasks, started = [], {}
        for bucket in range(self._num_buckets):
            name = f"{self.name}.{bucket}"
            started[name] = (
                time.perf_counter()
            )  # before: Horovod's thread may find it before this one goes on
            tasks.append(driver.start(name, one(name)))
        driver.wait(tasks)
        after = Clocks.now()
        if number >= 0:
            self.stamps.append(Stamps(started, noticed))
            self.seconds.append(after.wall - before.wall)
            self.cpu.append(after.cpu - before.cpu)
            self.own_cpu.append(after.own - before.own)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """All variants in turn, step by step."""
    driver, generator = HorovodDriver(), np.random.default_rng(0)
    variants = [Steps(**variant) for variant in settings["variants"]]
    with ranks.no_collection():
        for number in range(-_NUM_WARMUP, settings["repeat"]):
            for variant in variants:
                ranks.barrier()
                time.sleep(float(generator.random()) * _LONGEST_PAUSE)
                variant.take(driver, number)
            ranks.say(f"done rounds {number}")
    starts: Sequence[Any] = hvd.allgather_object(
        {variant.name: [stamps.started for stamps in variant.stamps] for variant in variants}
    )
    cpu = hvd.allgather_object(
        {v.name: (statistics.median(v.cpu), statistics.median(v.own_cpu)) for v in variants}
    )
    rank = hvd.rank()
    hvd.shutdown()  # the timeline is whole then
    if rank != 0:
        return {}
    parts = account(os.environ["HOROVOD_TIMELINE"], {v.name: v.stamps for v in variants}, starts)
    return {
        "results": [
            {
                "variant": variant.name,
                "step_seconds": statistics.median(variant.seconds),
                "cpu_seconds": statistics.mean(one[variant.name][0] for one in cpu),
                "own_cpu_seconds": statistics.mean(one[variant.name][1] for one in cpu),
                "parts": parts[variant.name],
            }
            for variant in variants
        ]
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="horovod_sparse_rounds") as folder:
        os.environ["HOROVOD_TIMELINE"] = str(Path(folder) / "timeline.json")
        os.environ["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
        sys.exit(ranks.main(measure))
