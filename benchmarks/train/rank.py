"""One rank of `scripts/bench train`: whole iterations of a model, dense and sparsified."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.iteration import iterate
from benchmarks.common.replay import Replay
from benchmarks.common.wire import Round, rounds_of
from benchmarks.studies.tasks import DigitNet
from benchmarks.train.main import ALONE, BY_DEFAULT, DENSELY, DIGITS
from horovod_sparse.merging import min_elements
from horovod_sparse.plans import TENSOR_SELECTION_VARIABLE
from horovod_sparse.sparsifiers import Sparsifier, WholeSum


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
    """The same, but decoding each message densely."""
    arguments = vars(sparsifier)
    return type("Densely", (_DecodedDensely, type(sparsifier)), {})(**arguments)


class Training:
    """A model, its optimizer, and one way of synchronizing: a method, as `measure_methods` takes it.

    Args:
        name: in results.
        settings: of the measurement.
    """

    num_warmup = 3

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        torch.manual_seed(hvd.rank())  # data differ between ranks; parameters are made equal below
        self._model, self._loss = make_model(settings["model"], settings["batch"])
        sgd = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        named = [(f"{name}.{label}", p) for label, p in self._model.named_parameters()]
        self.num_elements = sum(p.numel() for _, p in named)
        self._bytes_per_element = 2 if name == "dense float16" else 4
        self.parts: dict[str, float] = {}
        if name == ALONE:
            self._optimizer: Any = sgd
            return
        compression = {"dense": "none", "dense float16": "fp16"}.get(name) or settings["sparsifiers"][name]
        options = dict(settings["options"]) if name in settings["sparsifiers"] else {}
        if options and settings["min_elements"] is not None:
            options["tensor_selection"] = min_elements(settings["min_elements"])
        os.environ[TENSOR_SELECTION_VARIABLE] = "large" if BY_DEFAULT in name else "all"
        chosen = hvd.Compression.parse(compression)
        if DENSELY in name:
            recipe = replace(chosen.recipe, sparsifier=densely(chosen.recipe.sparsifier))
            chosen = type(chosen)(recipe)
        self._optimizer = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=chosen, **options)
        hvd.broadcast_parameters(dict(named), root_rank=0)

    def prepare(self) -> None:
        """Nothing: everything belongs to an iteration."""

    def run(self) -> None:
        """One iteration."""
        self.parts = iterate(self._optimizer, self._loss, alone=self.name == ALONE)

    def rounds(self) -> list[Round]:
        """The collectives of the last iteration, as one of each kind."""
        if self.name == ALONE:
            return []
        synchronizer = getattr(self._optimizer, "_synchronizer", None)
        if synchronizer is None:
            return [Round("AllReduce", self._bytes_per_element * self.num_elements)]
        totals: dict[str, int] = {}
        for part in synchronizer.parts:
            found = rounds_of(part) if part in synchronizer.sparse else [_dense_round(part)]
            for item in found:
                totals[item.kind] = totals.get(item.kind, 0) + item.payload
        return [Round(kind, payload) for kind, payload in totals.items()]

    def facts(self) -> dict[str, float]:
        """Densities, and seconds of what a sparsifier does while backward runs."""
        telemetry = getattr(self._optimizer, "telemetry", None)
        if telemetry is None or telemetry.last is None:
            return {"density_selected": 1.0, "density_union": 1.0}
        last = telemetry.last
        names = ("density_selected", "density_union", "fold_seconds", "select_seconds", "apply_seconds")
        return {name: getattr(last, name) for name in names}


def make_model(name: str, batch: int) -> tuple[Any, Callable[[], Any]]:
    """A model, and what computes its loss, of random data."""
    if name != DIGITS:
        replay = Replay(name)
        return replay, replay
    model, images, labels = DigitNet(320), torch.randn(batch, 28, 28), torch.randint(0, 10, (batch,))
    return model, lambda: torch.nn.functional.cross_entropy(model(images), labels)


def _dense_round(part: Any) -> Round:
    # half types are summed in float32
    element_bytes = max(4, part.gradient.flat.element_size())
    return Round("AllReduce", element_bytes * part.gradient.num_elements)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Every way of synchronizing in turn."""
    methods = [Training(name, settings) for name in settings["methods"]]
    own = ranks.own_traffic(5)
    results = ranks.results_of(methods, settings["repeat"], own)
    return {"horovod_own": own, "elements": methods[0].num_elements, "results": results}


if __name__ == "__main__":
    sys.exit(ranks.main(measure))
