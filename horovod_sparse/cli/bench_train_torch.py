"""One rank of `scripts/bench train` with PyTorch: whole iterations of a model, dense and sparsified."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horovod_sparse.cli.bench_models import make_model
from horovod_sparse.cli.bench_samples import plain, summarize
from horovod_sparse.cli.bench_sync_rank import expected_bytes, measure_methods, own_traffic
from horovod_sparse.cli.bench_wire import Round, rounds_of

__all__ = ["Training", "main"]

torch: Any = importlib.import_module("torch")
hvd: Any = importlib.import_module("horovod_sparse.torch")


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
        compression = {"dense": "none", "dense float16": "fp16"}.get(name) or settings["sparsifiers"][name]
        named = [(f"{name}.{label}", p) for label, p in self._model.named_parameters()]
        self.num_elements = sum(p.numel() for _, p in named)
        options = settings["options"] if name in settings["sparsifiers"] else {}
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9),
            named_parameters=named,
            compression=hvd.Compression.parse(compression),
            **options,
        )
        hvd.broadcast_parameters(dict(named), root_rank=0)
        self._bytes_per_element = 2 if name == "dense float16" else 4
        self.parts: dict[str, float] = {}

    def prepare(self) -> None:
        """Nothing: everything belongs to an iteration."""

    def run(self) -> None:
        """One iteration."""
        clock, optimizer = time.perf_counter, self._optimizer
        started = clock()
        optimizer.zero_grad()
        loss = self._loss()
        forward = clock()
        loss.backward()
        backward = clock()
        optimizer.synchronize()
        synchronized = clock()
        with optimizer.skip_synchronize():
            optimizer.step()
        self.parts = {
            "forward": forward - started,
            "backward": backward - forward,
            "exchange": synchronized - backward,
            "step": clock() - synchronized,
        }

    def rounds(self) -> list[Round]:
        """The collectives of the last iteration, as one of each kind."""
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


def _dense_round(part: Any) -> Round:
    return Round("AllReduce", part.gradient.array.nbytes)


def main(arguments: Sequence[str]) -> int:
    """Measures; rank 0 writes the result.

    Args:
        arguments: file of the settings, file for the result.
    """
    asked, answered = map(Path, arguments)
    settings = json.loads(asked.read_text())
    torch.set_num_threads(1)
    hvd.init()

    def say(line: str) -> None:
        if hvd.rank() == 0:
            print(line, flush=True)

    methods = [Training(name, settings) for name in settings["methods"]]
    own = own_traffic(5)
    gc.collect()
    gc.disable()
    samples = measure_methods(methods, settings["repeat"], lambda line: say(f"done {line}"))
    gc.enable()
    results = []
    for method in methods:
        result = summarize(hvd.allgather_object([plain(sample) for sample in samples[method.name]]))
        result["bytes"] = expected_bytes(result, own, hvd.size())
        result["facts"] = {k: v for k, v in result["facts"].items() if not k.startswith("payload.")}
        results.append({"method": method.name, **result})
    if hvd.rank() == 0:
        facts = {"ranks": hvd.size(), "horovod_own": own, "elements": methods[0].num_elements}
        answered.write_text(json.dumps({**facts, "results": results}))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
