"""`scripts/bench train`: whole iterations of a known network across hosts, dense and sparsified.

Its parameters and the times of its computing, which are slept through, are those of a layer table.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.layers import LAYER_TABLES
from benchmarks.common.options import (
    add_sparsifiers,
    baselines,
    hosts_parser,
    launches,
    named_sparsifiers,
)
from benchmarks.common.replay import Replay
from benchmarks.common.tables import launch_tables
from horovod_sparse.plans import TENSOR_SELECTION_VARIABLE
from horovod_sparse.sparsifiers import Sparsifier, WholeSum

_BASELINES = ("dense", "dense float16")
#: a training that synchronizes nothing: what computing alone takes where ranks share cores
ALONE = "alone"
#: passes of `best` at density 0.01, by arguments of `DistributedOptimizer`; the last one never exchanges
PASSES: dict[str, dict[str, Any]] = {
    "best": {},
    "best, delay=1": {"delay": 1},
    "best, every=4": {"every": 4},
    "best, no exchange": {"every": 10**6},
}
#: behind the name of a sparsifier that is measured as it is where nothing is said of buckets
BY_DEFAULT = " by default"
#: behind the name of one whose messages are decoded to n elements each, and these added up
DENSELY = ", decoded densely"

tables = launch_tables


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = hosts_parser("train", __doc__)
    add = made.add_argument
    add("--model", choices=tuple(LAYER_TABLES), default="resnet50", help="(default %(default)s)")
    add("--passes", action="store_true", help="also passes of the optimizer's own steps, early and late")
    text = "also with each sparsifier: what is sparsified where nothing is said of buckets"
    add("--by-default", action="store_true", help=text)
    text = "also with each sparsifier: every message is decoded to all elements, and these are added up"
    add("--densely", action="store_true", help=text)
    add_sparsifiers(made, ("exdyna", "micro", "topk", "dgc"))
    add("--baselines", default=",".join(_BASELINES), help=f"and {ALONE}; default: %(default)s")
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything that the command line asks for; returns what is written to JSON."""
    sparsifiers = named_sparsifiers(options.sparsifiers, options.density)
    for asked, suffix in ((options.by_default, BY_DEFAULT), (options.densely, DENSELY)):
        if asked:
            sparsifiers |= {f"{name}{suffix}": text for name, text in sparsifiers.items()}
    facts = {"model": options.model, "density": options.density}
    settings = {
        **facts,
        "methods": [
            *baselines(options.baselines, (*_BASELINES, ALONE)),
            *sparsifiers,
            *(PASSES if options.passes else ()),
        ],
        "sparsifiers": sparsifiers,
        "repeat": options.repeat,
    }
    return {**facts, "launches": launches("benchmarks.train", options, lambda num_hosts: [settings])}


class _DecodedDensely:
    """Decodes as one writes it first: every rank's message becomes n elements, and these are added up."""

    def synchronize(self, accumulator: Any, state: Any, info: Any) -> Any:
        sum_, after = yield from super().synchronize(accumulator, state, info)  # type: ignore[misc]
        # kept from step to step: memory that is new in every step would be what is measured
        kept = vars(self).setdefault("decoded", {})
        key = info.name, info.num_elements, info.rank
        if key not in kept:
            kept[key] = np.zeros((2, info.num_elements), info.value_dtype)
        total, one = kept[key]
        total[:] = 0
        for stop, count in zip(np.cumsum(sum_.counts), sum_.counts, strict=True):
            message = slice(stop - count, stop)
            one[:] = 0
            one[sum_.indices[message]] = sum_.values[message]
            total += one
        return WholeSum(total, sum_.counts, sum_.notes), after


def densely(sparsifier: Sparsifier) -> Sparsifier:
    """Returns the sparsifier with dense decoding of each message."""
    arguments = vars(sparsifier)
    return type("Densely", (_DecodedDensely, type(sparsifier)), {})(**arguments)


class Training(ranks.Measurable):
    """Trains a model with one way of synchronizing."""

    num_warmup = 3

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        torch.manual_seed(hvd.rank())  # data differ between ranks; parameters are made equal below
        self._model = Replay(settings["model"])
        own = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        named = [(f"{name}.{label}", p) for label, p in self._model.named_parameters()]
        self.num_elements = sum(p.numel() for _, p in named)
        self.parts: dict[str, float] = {}
        if name == ALONE:
            self._optimizer: Any = own
            return
        if name in PASSES:
            best = hvd.Compression.best(density=0.01)
            self._optimizer = hvd.DistributedOptimizer(own, named, compression=best, **PASSES[name])
            hvd.broadcast_parameters(dict(named), root_rank=0)
            return
        compression = {"dense": "none", "dense float16": "fp16"}.get(name) or settings["sparsifiers"][name]
        os.environ[TENSOR_SELECTION_VARIABLE] = "large" if BY_DEFAULT in name else "all"
        chosen = hvd.Compression.parse(compression)
        if DENSELY in name:
            recipe = replace(chosen.recipe, sparsifier=densely(chosen.recipe.sparsifier))
            chosen = type(chosen)(recipe)
        self._optimizer = hvd.DistributedOptimizer(own, named_parameters=named, compression=chosen)
        hvd.broadcast_parameters(dict(named), root_rank=0)

    def run(self) -> None:
        """Runs one iteration."""
        self.parts = ranks.iterate(self._optimizer, self._model, alone=self.name == ALONE)

    def facts(self) -> dict[str, float]:
        """Returns densities, and the sparsifier's seconds beside backward."""
        telemetry = getattr(self._optimizer, "telemetry", None)
        if telemetry is None or telemetry.last is None:
            return {"density_selected": 1.0, "density_union": 1.0}
        last = telemetry.last
        names = ("density_selected", "density_union", "fold_seconds", "select_seconds", "apply_seconds")
        return {"waited_seconds": last.wait_seconds, **{name: getattr(last, name) for name in names}}


def on_rank(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures every way of synchronizing in turn; called on every rank."""
    methods = [Training(name, settings) for name in settings["methods"]]
    found = ranks.measure_methods(methods, settings["repeat"])
    results = [{"method": name, **result} for name, result in found.items()]
    return {"elements": methods[0].num_elements, "results": results}
