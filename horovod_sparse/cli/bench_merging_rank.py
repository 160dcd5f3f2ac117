"""One rank of `scripts/bench merging`: predicts an iteration under several plans, and measures it."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horovod_sparse.cli.bench_merging_models import make_network
from horovod_sparse.cli.bench_samples import plain, summarize
from horovod_sparse.cli.bench_sync_rank import measure_methods
from horovod_sparse.cli.bench_wire import Round
from horovod_sparse.cost import Profile
from horovod_sparse.frontend import measured_step
from horovod_sparse.merging import Plan, Timeline, fixed, predict

__all__ = ["METHODS", "main"]

torch: Any = importlib.import_module("torch")
hvd: Any = importlib.import_module("horovod_sparse.torch")

#: arguments of the optimizer, by the name that results have
METHODS: dict[str, dict[str, Any]] = {
    "layerwise": {"merging": "layerwise"},
    "single": {"merging": "single"},
    "fixed 8192": {"merging": fixed(num_elements=8192)},
    "omgs": {"merging": "omgs"},
    "optimal": {"merging": "optimal"},
    "joint": {"merging": "joint"},
    "cost, optimal": {"merging": "optimal", "tensor_selection": "cost"},
    "all dense": {"tensor_selection": lambda parameter: False},
}
#: with one synchronization to begin with and one to warm up, the 5 that are measured
_WARMUP_STEPS = 7


class Training:
    """A network under one plan; a method, as `measure_methods` takes it.

    Args:
        name: in results.
        settings: of the measurement.
        profile: of the cluster and the network; measured if left out.
    """

    num_warmup = 1

    def __init__(self, name: str, settings: dict[str, Any], profile: Profile | None = None) -> None:
        self.name = name
        torch.manual_seed(hvd.rank())  # data differ between ranks
        self._model, self._loss = make_network(settings["model"], settings["scale"])
        named = list(self._model.named_parameters())
        hvd.broadcast_parameters(dict(named), root_rank=0)
        self._sparsifier = hvd.Compression.parse(settings["sparsifier"])
        arguments = METHODS[name]
        if arguments.get("merging") in ("omgs", "optimal", "joint"):
            arguments = {**arguments, "profile": profile}
        # small, so that the sleeping network does not run away
        sgd = torch.optim.SGD(self._model.parameters(), lr=1e-6)
        self.optimizer = hvd.DistributedOptimizer(sgd, named, self._sparsifier, **arguments)
        self.parts: dict[str, float] = {}
        self.iterations = settings["iterations"]

    def prepare(self) -> None:
        """One iteration that does not count: the caches are another method's."""
        self.run_once()

    def run(self) -> None:
        """Iterations one behind the other, as in a training."""
        self.parts = {}
        for _ in range(self.iterations):
            self.run_once()

    def run_once(self) -> None:
        """One iteration."""
        clock, optimizer = time.perf_counter, self.optimizer
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
        found = {
            "forward": forward - started,
            "backward": backward - forward,
            "exchange": synchronized - backward,
            "step": clock() - synchronized,
        }
        for part, seconds in found.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds / self.iterations

    def rounds(self) -> list[Round]:
        """None: bytes are not this measurement's matter."""
        return []

    def facts(self) -> dict[str, float]:
        """What the last iteration was made of, beside backward."""
        last = self.optimizer.telemetry.last
        names = ("fold_seconds", "select_seconds", "wait_seconds", "apply_seconds", "bytes_sent")
        return {name: float(getattr(last, name)) for name in names}

    def predicted(self, profile: Profile) -> Timeline:
        """An iteration as the profile's model has it."""
        facts = [fact for fact, _ in self.optimizer._synchronizer.facts.values()]
        workload, cost = measured_step(profile, facts, self._sparsifier.recipe.sparsifier, hvd.size())
        return predict(workload, self.optimizer.plan, cost)


def _profile(settings: dict[str, Any]) -> Profile:
    """What an optimizer measures in its warm-up."""
    training = Training("optimal", settings)
    for _ in range(_WARMUP_STEPS):
        training.run_once()
    profile: Profile = training.optimizer.decision.profile
    return profile


def _result(method: Training, profile: Profile, samples: list[Any]) -> dict[str, Any]:
    measured = summarize(hvd.allgather_object([plain(sample) for sample in samples]))
    timeline, plan = method.predicted(profile), method.optimizer.plan
    per_iteration = {
        name: {key: float(f"{value / method.iterations:.6g}") for key, value in measured[name].items()}
        for name in ("seconds", "cpu_seconds")
    }
    predicted = timeline.iteration_seconds
    return {
        "method": method.name,
        "buckets": len(plan.buckets),
        "dense": len(plan.dense),
        "predicted_seconds": float(f"{predicted:.6g}"),
        "predicted_computation_seconds": float(f"{timeline.computation_end:.6g}"),
        "error": float(f"{predicted / per_iteration['seconds']['median'] - 1.0:.4g}"),
        **per_iteration,
        "parts": {name: value for name, value in measured["parts"].items() if name != "other"},
        "facts": measured["facts"],
        "repetitions": measured["repetitions"],
        "bucket_elements": _sizes(plan, method),
    }


def _sizes(plan: Plan, method: Training) -> list[int]:
    """Elements of every bucket."""
    facts = method.optimizer._synchronizer.facts
    return [sum(facts[name][0].num_elements for name in names) for names in plan.buckets]


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

    profile = _profile(settings)
    say("done profile 0")
    methods = [Training(name, settings, profile) for name in settings["methods"]]
    gc.collect()
    gc.disable()
    samples = measure_methods(methods, settings["repeat"], lambda line: say(f"done {line}"))
    gc.enable()
    results = [_result(method, profile, samples[method.name]) for method in methods]
    if hvd.rank() == 0:
        facts = methods[0].optimizer._synchronizer.facts.values()
        elements = sum(fact.num_elements for fact, _ in facts)
        told = {"ranks": hvd.size(), "elements": elements, "parameters": len(facts)}
        answered.write_text(
            json.dumps({**told, "profile": json.loads(profile.to_json()), "results": results})
        )
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
