"""`scripts/bench sync`: one gradient synchronization across hosts, dense, naive and sparsified."""

from __future__ import annotations

import abc
import argparse
import os
import resource
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.gradients import GradientSource, random_layers
from benchmarks.common.options import (
    add_sparsifiers,
    baselines,
    count,
    hosts_parser,
    launches,
    named_sparsifiers,
)
from benchmarks.common.tables import launch_tables
from horovod_sparse.sparsifiers import ALGORITHMS
from horovod_sparse.training.settings import TRANSPORT_VARIABLE, requested_transport

_BASELINES = ("dense", "dense float16", "naive")
#: behind the name of a sparsifier that is synchronized on two levels
LEVELS_SUFFIX = ", two levels"
#: behind the name of a sparsifier whose rounds are messages between pairs of ranks
PAIRS_SUFFIX = ", pairs"

tables = launch_tables


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = hosts_parser("sync", __doc__)
    add = made.add_argument
    add("--elements", type=count, default=25_600_000, help="n, one tensor (default %(default)s)")
    text = "with more than one (default %(default)s) each sparsifier is measured on two levels, too"
    add("--ranks-per-host", type=count, default=1, metavar="L", help=text)
    text = "sparsifiers in a launch, each beside the baselines: what memory holds (default %(default)s)"
    add("--at-once", type=count, default=4, metavar="N", help=text)
    text = "each sparsifier is measured with its rounds as messages between pairs of ranks, too"
    add("--pairs", action="store_true", help=text)
    add_sparsifiers(made, ALGORITHMS)
    add("--baselines", default=",".join(_BASELINES), help="default: %(default)s")
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything that the command line asks for; returns what is written to JSON."""
    sparsifiers = named_sparsifiers(options.sparsifiers, options.density)
    references = baselines(options.baselines, _BASELINES)
    names = list(sparsifiers)
    num_parts = max(1, -(-len(names) // options.at_once))
    settings, sizes = [], {name: getattr(options, name) for name in ("elements", "density", "repeat")}
    for number in range(num_parts):
        own = names[number * len(names) // num_parts : (number + 1) * len(names) // num_parts]
        methods = [*references, *own]
        if options.ranks_per_host > 1:
            methods += [name + LEVELS_SUFFIX for name in own if name != "hard_threshold"]
        if options.pairs:
            methods += [name + PAIRS_SUFFIX for name in own]
        settings.append(
            {**sizes, "methods": methods, "sparsifiers": {name: sparsifiers[name] for name in own}}
        )
    facts = {name: getattr(options, name) for name in ("elements", "density", "ranks_per_host")}
    return {**facts, "launches": launches("benchmarks.sync", options, lambda num_hosts: settings)}


#: how rounds travel, as the user has said
_ASKED = requested_transport()


class Gradient:
    """Draws one tensor's gradient anew for every synchronization."""

    def __init__(self, num_elements: int) -> None:
        self._source = GradientSource(random_layers(num_elements), hvd.rank())
        self.flat = torch.zeros(num_elements)

    def draw(self) -> None:
        self._source.fill(self.flat.numpy())


class Method(ranks.Measurable, abc.ABC):
    """Base class of the ways to synchronize a gradient."""

    num_warmup = 1

    def __init__(self, name: str, gradient: Gradient) -> None:
        self.name, self.gradient = name, gradient
        self.parts: dict[str, float] = {}

    def prepare(self) -> None:
        self.gradient.draw()


class Dense(Method):
    """Synchronizes by Horovod's allreduce in place, as its optimizer does; perhaps in float16."""

    def __init__(self, name: str, gradient: Gradient, compression: Any) -> None:
        super().__init__(name, gradient)
        self._compression = compression

    def run(self) -> None:
        clock, flat = time.perf_counter, self.gradient.flat
        started = clock()
        packed, context = self._compression.compress(flat)
        compressed = clock()
        total = hvd.synchronize(hvd.allreduce_async_(packed, name=self.name, op=hvd.Average))
        exchanged = clock()
        if context is not None:
            flat.copy_(self._compression.decompress(total, context))
        self.parts = {
            "select": compressed - started,
            "exchange": exchanged - compressed,
            "apply": clock() - exchanged,
        }

    def facts(self) -> dict[str, float]:
        return {"density_selected": 1.0, "density_union": 1.0}


class Naive(Method):
    """Synchronizes as one would first write it: `torch.topk` of magnitudes, and two allgathers.

    Indices travel as int32, which many programs do not bother to do.
    """

    def __init__(self, name: str, gradient: Gradient, density: float) -> None:
        super().__init__(name, gradient)
        self._k = max(1, round(density * gradient.flat.numel()))
        self._residual = torch.zeros_like(gradient.flat)
        self._indices = torch.empty(0, dtype=torch.int32)

    def run(self) -> None:
        clock, flat, residual = time.perf_counter, self.gradient.flat, self._residual
        started = clock()
        residual.add_(flat)
        folded = clock()
        own = torch.topk(residual.abs(), self._k).indices
        values = residual[own]
        residual[own] = 0.0
        selected = clock()
        handles = [
            hvd.allgather_async(values, name=f"{self.name}.values"),
            hvd.allgather_async(own.to(torch.int32), name=f"{self.name}.indices"),
        ]
        values, self._indices = (hvd.synchronize(handle) for handle in handles)
        exchanged = clock()
        flat.zero_()
        flat.index_add_(0, self._indices, values.div_(hvd.size()))
        self.parts = {
            "fold": folded - started,
            "select": selected - folded,
            "exchange": exchanged - selected,
            "apply": clock() - exchanged,
        }

    def facts(self) -> dict[str, float]:
        n, union = self.gradient.flat.numel(), np.unique(self._indices.numpy()).size
        return {"density_selected": self._k / n, "density_union": union / n}


class Sparse(Method):
    """Synchronizes by a sparsifier and our optimizer; `transport` carries its rounds."""

    num_warmup = 6

    def __init__(
        self, name: str, gradient: Gradient, compression: str, levels: str, transport: str = _ASKED
    ) -> None:
        super().__init__(name, gradient)
        self._transport = os.environ[TRANSPORT_VARIABLE] = transport
        self._parameter = torch.nn.Parameter(torch.empty(gradient.flat.numel()))
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([self._parameter], lr=1.0),
            # messages have names of their own, as if there were no other method: Horovod caches by name
            named_parameters=[(f"{name}.gradient", self._parameter)],
            compression=hvd.Compression.parse(compression),
            levels=levels,
        )
        self._synchronizer = self._optimizer._synchronizer
        if self._synchronizer is None:
            raise RuntimeError("one rank alone synchronizes nothing: use two hosts or more")

    def prepare(self) -> None:
        super().prepare()
        os.environ[TRANSPORT_VARIABLE] = self._transport
        self._parameter.grad = self.gradient.flat.clone()

    def run(self) -> None:
        self._optimizer.synchronize()
        last = self._optimizer.telemetry.last
        self.parts = {
            "fold": last.fold_seconds,
            "select": last.select_seconds,
            "exchange": last.wait_seconds,
            "apply": last.apply_seconds,
        }

    def facts(self) -> dict[str, float]:
        last = self._optimizer.telemetry.last
        held = sum(part.bucket.accumulator.values().nbytes for part in self._synchronizer.sparse)
        names = ("density_selected", "density_union", "bytes_sent", "bytes_inside")
        return {**{name: getattr(last, name) for name in names}, "residual_bytes": held}


def make_method(name: str, gradient: Gradient, density: float, sparsifiers: Mapping[str, str]) -> Method:
    """Makes a baseline or sparsifier by name; `sparsifiers` are texts for `Compression.parse`."""
    if name == "dense":
        return Dense(name, gradient, hvd.Compression.none)
    if name == "dense float16":
        return Dense(name, gradient, hvd.Compression.fp16)
    if name == "naive":
        return Naive(name, gradient, density)
    transport = "pairs" if name.endswith(PAIRS_SUFFIX) else _ASKED
    levels = "host" if name.endswith(LEVELS_SUFFIX) else "flat"
    own = name.removesuffix(PAIRS_SUFFIX).removesuffix(LEVELS_SUFFIX)
    text = sparsifiers[own]
    if own == "hard_threshold":
        text += f",threshold={_reached_by(gradient, density)}"
    return Sparse(name, gradient, text, levels, transport)


def _reached_by(gradient: Gradient, density: float) -> float:
    """Returns a threshold that about density * n elements reach in the middle of a measurement.

    What hard threshold guesses from its first gradient is too low for the steps that follow, in which the
    residual grows; nothing steers it.
    """
    gathered = np.zeros_like(gradient.flat.numpy())
    for _ in range(Sparse.num_warmup + 4):
        gradient.draw()
        gathered += gradient.flat.numpy()
    position = round((1 - density) * gathered.size)
    threshold = float(np.partition(np.abs(gathered, out=gathered), position)[position])
    return float(hvd.broadcast_object(threshold, root_rank=0))


def on_rank(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures every method in turn; called on every rank."""
    gradient = Gradient(settings["elements"])
    methods = [
        make_method(name, gradient, settings["density"], settings["sparsifiers"])
        for name in settings["methods"]
    ]
    found = ranks.measure_methods(methods, settings["repeat"])
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results = [{"method": name, **result} for name, result in found.items()]
    return {"results": results, "peak_bytes_of_ranks": sum(hvd.allgather_object(peak))}
