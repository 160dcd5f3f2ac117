"""`scripts/bench allreduce`: what the messages of sparse all-reduces take across hosts, method by method.

All methods sum up the same gradients in the same launch. After every step its messages are sent once more,
without any work in between: that is the communication time, which selections on cores that many ranks share
do not blur.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.gradients import GradientSource, random_layers
from benchmarks.common.options import (
    add_sparsifiers,
    count,
    hosts_parser,
    launches,
    named_sparsifiers,
)
from benchmarks.common.tables import markdown
from horovod_sparse.arrays import GradientParts, HostAccumulator
from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.feedback import Bucket, NoFeedback, Recipe, parse_recipe
from horovod_sparse.sparsifiers import BucketInfo, SparseSum
from horovod_sparse.torch.driver import HorovodDriver

_FAMILY = "the family; spardl with every number of teams"
_OTHERS = ("topk", "topk_dsa", "gtopk", "oktopk", "oktopk:threshold_steps=4")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = hosts_parser("allreduce", __doc__)
    made.add_argument("--elements", type=count, default=25_600_000, help="n (default %(default)s)")
    made.add_argument(
        "--add", action="store_true", help="add the launches to those of --json's file, where it exists"
    )
    add_sparsifiers(made, [_FAMILY])
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything that the command line asks for; returns what is written to JSON."""

    def settings(num_ranks: int) -> list[dict[str, Any]]:
        text = options.sparsifiers
        if text == _FAMILY:
            teams = [f"spardl:teams={d}" for d in range(1, num_ranks + 1) if num_ranks % d == 0]
            text = " ".join([*_OTHERS, *teams])
        facts = {"elements": options.elements, "density": options.density, "repeat": options.repeat}
        return [{**facts, "sparsifiers": named_sparsifiers(text, options.density)}]

    return {"launches": launches("benchmarks.allreduce", options, settings)}


def _table(one: dict[str, Any]) -> str:
    medians = {item["method"]: item["communication"]["seconds"]["median"] for item in one["results"]}
    best = min((name for name in medians if name.startswith("spardl")), key=medians.__getitem__, default=None)
    rows = []
    for item in one["results"]:
        name, facts, times = item["method"], item["step"]["facts"], item["communication"]["seconds"]
        rows.append(
            [
                f"**`{name}`**" if name == best else f"`{name}`",
                "{median:.1f} ({low:.1f} to {high:.1f})".format(**{q: 1e3 * s for q, s in times.items()}),
                "-" if best is None else f"{times['median'] / medians[best]:.2f}",
                f"{1e3 * item['step']['seconds']['median']:.0f}",
                f"{facts['rounds']:.0f}",
                f"{item['communication']['bytes_sent'] / 1e3:.0f}",
                f"{facts['density_union']:.2%}",
            ]
        )
    head = ["method", "communication, ms", "to SparDL at best", "step, ms", "rounds", "kB sent", "union"]
    return markdown(head, rows)


def tables(result: dict[str, Any]) -> str:
    """Returns a Markdown table for every launch, with the best SparDL in bold."""
    parts = []
    for one in result["launches"]:
        network = "MPI" if one["network"].startswith("mpi") else "Gloo"
        head = (
            f"{one['ranks']} hosts at {one['rate']}, {network}, n = {one['elements'] / 1e6:g} million, "
            f"density {one['density']:g}; pairs by {one['transport']}:"
        )
        parts.append(f"{head}\n\n{_table(one)}\n")
    return "\n".join(parts)


def recorded(coroutine: Synchronization[SparseSum], requests: list[Request]) -> Synchronization[SparseSum]:
    """Runs a synchronization, and appends its requests to `requests`."""
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
    """Sends the same messages in the same order, with no computation in between."""
    for request in requests:
        _answer = yield request


class Method(ranks.Measurable):
    """Measures one sparse all-reduce.

    Every repetition selects from the gradient alone (no residual), so that all methods sum up alike, and
    thresholds that follow the last step meet gradients like those of the last step. All methods share the
    source of gradients and the accumulator.
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
    """Measures the messages alone of a method's last repetition."""

    num_warmup = Method.num_warmup

    def __init__(self, method: Method, driver: HorovodDriver) -> None:
        self.name, self._method, self._driver, self.parts = f"{method.name}.again", method, driver, {}

    def run(self) -> None:
        task = self._driver.start(self.name, replayed(self._method.requests))
        self._driver.wait([task])
        task.value()


def on_rank(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures every method in turn, and its messages alone; called on every rank."""
    source = GradientSource(random_layers(settings["elements"]), hvd.rank())
    memory = HostAccumulator(settings["elements"], density=settings["density"])
    driver = HorovodDriver()
    driver.choose_transport()
    methods = [Method(name, text, source, memory, driver) for name, text in settings["sparsifiers"].items()]
    both = [one for method in methods for one in (method, Messages(method, driver))]
    found = ranks.measure_methods(both, settings["repeat"])
    results = [
        {"method": name, "step": found[name], "communication": found[f"{name}.again"]}
        for name in settings["sparsifiers"]
    ]
    facts = {name: settings[name] for name in ("elements", "density")}
    return {**facts, "transport": driver.transport, "results": results}
