"""One rank of `scripts/bench allreduce`: the same gradients summed by every method; messages alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.gradients import GradientSource, random_layers
from benchmarks.common.samples import Sample, plain, summarize, timed
from horovod_sparse.arrays import GradientParts, HostAccumulator
from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.feedback import Bucket, NoFeedback, Recipe, parse_recipe
from horovod_sparse.sparsifiers import BucketInfo, SparseSum
from horovod_sparse.torch.driver import HorovodDriver

#: repetitions before those that count: Ok-Topk finds its thresholds and regions in the first
_NUM_WARMUP = 2


def recorded(coroutine: Synchronization[SparseSum], requests: list[Request]) -> Synchronization[SparseSum]:
    """A synchronization whose requests are written down."""
    answer: Any = None
    while True:
        try:
            request = coroutine.send(answer)
        except StopIteration as stop:
            sum_: SparseSum = stop.value
            return sum_
        requests.append(request)
        answer = yield request


def replayed(requests: Sequence[Request]) -> Synchronization[None]:
    """The same messages in the same order, one round after the other, and nothing in between."""
    for request in requests:
        _answer = yield request


class Method:
    """One sparse all-reduce.

    Every repetition selects from the gradient alone (no residual), so that all methods sum up the same,
    and thresholds that follow the last step meet gradients like those of the last step.

    Args:
        name: in results.
        text: as `Compression.parse` reads it.
        memory: the accumulator that all methods share.
        driver: runs coroutines.
        place: (rank, size).
    """

    def __init__(
        self, name: str, text: str, memory: HostAccumulator, driver: HorovodDriver, place: tuple[int, int]
    ) -> None:
        self.name, self._driver = name, driver
        rank, size = place
        info = BucketInfo(name, memory.num_elements, rank, size)
        self._bucket = Bucket(info, Recipe(parse_recipe(text).sparsifier, NoFeedback()), memory)
        self._gradient: Any = None
        self._requests: list[Request] = []
        self._sum: SparseSum | None = None

    def take(self, gradient: Any) -> None:
        """The gradient of the next `run`."""
        self._gradient = gradient
        self._requests = []

    def run(self) -> None:
        """Selects, and sums up."""
        step = recorded(self._bucket.step(self._gradient), self._requests)
        task = self._driver.start(self.name, step)
        self._driver.wait([task])
        self._sum = task.value()

    def communicate(self) -> None:
        """The messages of the last `run` alone."""
        task = self._driver.start(f"{self.name}.again", replayed(self._requests))
        self._driver.wait([task])
        task.value()

    def facts(self) -> dict[str, float]:
        """Of the last `run`."""
        last, sum_ = self._bucket.last, self._sum
        union = 0 if sum_ is None else np.unique(sum_.indices).size
        return {
            "rounds": float(len(last.bytes_by_round)),
            "payload_bytes": float(last.bytes_sent),
            "density_selected": last.num_selected / last.num_elements,
            "density_union": union / last.num_elements,
        }


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Every method in turn, and its messages alone."""
    place = (hvd.rank(), hvd.size())
    source = GradientSource(random_layers(settings["elements"]), hvd.rank())
    memory = HostAccumulator(settings["elements"], density=settings["density"])
    driver = HorovodDriver()
    driver.connect()
    methods = [Method(name, text, memory, driver, place) for name, text in settings["sparsifiers"].items()]
    drawn = np.empty(settings["elements"], np.float32)
    whole: dict[str, list[Sample]] = {method.name: [] for method in methods}
    alone: dict[str, list[Sample]] = {method.name: [] for method in methods}
    with ranks.no_collection():
        for number in range(-_NUM_WARMUP, settings["repeat"]):
            source.fill(drawn)
            # another one comes first every time: nobody always follows the same one
            for place_in_turn in range(len(methods)):
                method = methods[(place_in_turn + number) % len(methods)]
                method.take(GradientParts([drawn]))
                step = timed(method.run, ranks.barrier)
                again = timed(method.communicate, ranks.barrier)
                ranks.say(f"done {method.name} {number}")
                if number >= 0:
                    whole[method.name].append(replace(step, facts=method.facts()))
                    alone[method.name].append(again)
    results = []
    for method in methods:
        everyone = hvd.allgather_object(
            ([plain(s) for s in whole[method.name]], [plain(s) for s in alone[method.name]])
        )
        both = [summarize([rank[which] for rank in everyone]) for which in (0, 1)]
        results.append({"method": method.name, "step": both[0], "communication": both[1]})
    return {"transport": driver.transport, "results": results}


if __name__ == "__main__":
    sys.exit(ranks.main(measure))
