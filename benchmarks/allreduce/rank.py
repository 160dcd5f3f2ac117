"""One rank of `scripts/bench allreduce`: gradients summed by every method; messages alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.gradients import GradientSource, random_layers
from horovod_sparse.arrays import GradientParts, HostAccumulator
from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.feedback import Bucket, NoFeedback, Recipe, parse_recipe
from horovod_sparse.sparsifiers import BucketInfo, SparseSum
from horovod_sparse.torch.driver import HorovodDriver


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


class Method(ranks.Measurable):
    """One sparse all-reduce.

    Every repetition selects from the gradient alone (no residual), so that all methods sum up alike, and
    thresholds that follow the last step meet gradients like those of the last step.

    Args:
        name: in results.
        text: as `Compression.parse` reads it.
        source: of gradients, which all methods share.
        memory: the accumulator that all methods share.
        driver: runs coroutines.
    """

    #: Ok-Topk finds its thresholds and regions in these
    num_warmup = 2

    def __init__(
        self, name: str, text: str, source: GradientSource, memory: HostAccumulator, driver: HorovodDriver
    ) -> None:
        self.name, self._source, self._driver, self.parts = name, source, driver, {}
        info = BucketInfo(name, memory.num_elements, hvd.rank(), hvd.size())
        self._bucket = Bucket(info, Recipe(parse_recipe(text).sparsifier, NoFeedback()), memory)
        self._gradient = np.zeros(0, np.float32)
        self.requests: list[Request] = []

    def prepare(self) -> None:
        self._gradient = np.empty(self._source.num_elements, np.float32)
        self._source.fill(self._gradient)
        self.requests = []

    def run(self) -> None:
        step = recorded(self._bucket.step(GradientParts([self._gradient])), self.requests)
        task = self._driver.start(self.name, step)
        self._driver.wait([task])
        self._sum = task.value()

    def facts(self) -> dict[str, float]:
        last, union = self._bucket.last, np.unique(self._sum.indices).size
        return {
            "rounds": float(len(last.bytes_by_round)),
            "payload_bytes": float(last.bytes_sent),
            "density_selected": last.num_selected / last.num_elements,
            "density_union": union / last.num_elements,
        }


class Messages(ranks.Measurable):
    """The messages of a method's last repetition alone."""

    num_warmup = Method.num_warmup

    def __init__(self, method: Method, driver: HorovodDriver) -> None:
        self.name, self._method, self._driver, self.parts = f"{method.name}.again", method, driver, {}

    def run(self) -> None:
        task = self._driver.start(self.name, replayed(self._method.requests))
        self._driver.wait([task])
        task.value()


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Every method in turn, and its messages alone."""
    source = GradientSource(random_layers(settings["elements"]), hvd.rank())
    memory = HostAccumulator(settings["elements"], density=settings["density"])
    driver = HorovodDriver()
    driver.connect()
    methods = [Method(name, text, source, memory, driver) for name, text in settings["sparsifiers"].items()]
    both = [one for method in methods for one in (method, Messages(method, driver))]
    found = ranks.measure_methods(both, settings["repeat"])
    results = [
        {"method": name, "step": found[name], "communication": found[f"{name}.again"]}
        for name in settings["sparsifiers"]
    ]
    facts = {name: settings[name] for name in ("elements", "density")}
    return {**facts, "transport": driver.transport, "results": results}


if __name__ == "__main__":
    sys.exit(ranks.main(measure))
