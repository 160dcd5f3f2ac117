"""One rank of `scripts/bench merging`: predicts an iteration under several plans, and measures it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.replay import Replay
from benchmarks.common.samples import timed
from benchmarks.merging.main import GOES_ON
from horovod_sparse.merging import Plan, Profile, Timeline, fixed, predict

#: arguments of the optimizer, by the name that results have
METHODS: dict[str, dict[str, Any]] = {
    "layerwise": {"merging": "layerwise"},
    "single": {"merging": "single"},
    "fixed 8192": {"merging": fixed(num_elements=8192)},
    "omgs": {"merging": "omgs"},
    "optimal": {"merging": "optimal"},
    "cost, optimal": {"merging": "optimal", "tensor_selection": "cost"},
    "all dense": {"tensor_selection": lambda parameter: False},
}
#: of the layer table's sizes and times
_SCALE = 0.25
#: more than an optimizer takes to decide
_WARMUP_STEPS = 30
#: iterations of a fresh network before those that count
_FIRST_ITERATIONS = 4


class Training:
    """A network under one plan.

    Args:
        name: in results.
        settings: of the measurement.
        profile: of the cluster and the network; measured if left out.
    """

    def __init__(self, name: str, settings: dict[str, Any], profile: Profile | None = None) -> None:
        self.name, self.iterations = name, settings["iterations"]
        self._settings = settings
        self._arguments = dict(METHODS[name])
        self._sparsifier = hvd.Compression.parse(settings["sparsifiers"]["topk"])
        if self._arguments.get("merging") in ("omgs", "optimal") or "cost" in name:
            self._arguments["profile"] = profile
        self.parts: dict[str, float] = {}
        self.timeline: Timeline | None = None
        self.plan = Plan(())
        self.bucket_elements: list[int] = []

    def make(self) -> None:
        """The network and its optimizer."""
        # what ranks compute differs, and so do their weights, which nobody looks at: to make them equal would
        # take longer than many iterations
        torch.manual_seed(hvd.rank())
        self._model = Replay(self._settings["model"], _SCALE)
        named = list(self._model.named_parameters())
        # small, so that the sleeping network does not run away
        sgd = torch.optim.SGD(self._model.parameters(), lr=1e-6)
        self.optimizer = hvd.DistributedOptimizer(sgd, named, self._sparsifier, **self._arguments)

    def prepare(self) -> None:
        """Fresh, and past its first iterations."""
        self.make()
        for _ in range(_FIRST_ITERATIONS):
            self.run_once()

    def describe(self, profile: Profile) -> None:
        """Looks up what is to be told.

        Args:
            profile: by which an iteration is predicted.
        """
        self.timeline, self.plan = self.predicted(profile), self.optimizer.plan
        facts = self.optimizer._synchronizer.facts
        self.bucket_elements = [
            sum(facts[name][0].num_elements for name in names) for names in self.plan.buckets
        ]

    def run(self) -> None:
        """Iterations one behind the other, as in a training."""
        self.parts = {}
        for _ in range(self.iterations):
            self.run_once()

    def run_once(self) -> None:
        """One iteration."""
        found = ranks.iterate(self.optimizer, self._model)
        for part, seconds in found.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds / self.iterations
        self._last = self.optimizer.telemetry.last

    def facts(self) -> dict[str, float]:
        """What the last iteration was made of, beside backward."""
        last = self._last
        names = ("fold_seconds", "select_seconds", "wait_seconds", "apply_seconds", "bytes_sent")
        return {name: float(getattr(last, name)) for name in names}

    def predicted(self, profile: Profile) -> Timeline:
        """An iteration as the profile's model has it."""
        synchronizer = self.optimizer._synchronizer
        facts = [fact for fact, _ in synchronizer.facts.values()]
        chosen = self._sparsifier.recipe.sparsifier
        workload, cost = profile.step(facts, chosen, hvd.size(), synchronizer.topology)
        return predict(workload, self.optimizer.plan, cost)


def _warmed_up(settings: dict[str, Any]) -> Training:
    """A training that has measured and decided, as an optimizer does in its first steps."""
    training = Training("optimal", settings)
    training.name = GOES_ON
    training.make()
    for _ in range(_WARMUP_STEPS):
        training.run_once()
        if training.optimizer.decision is not None:
            break
    for _ in range(_FIRST_ITERATIONS):
        training.run_once()
    return training


def _result(method: Training, samples: list[Any]) -> dict[str, Any]:
    measured = ranks.over_ranks(samples)
    assert method.timeline is not None  # it has finished
    per_iteration = {
        name: {key: float(f"{value / method.iterations:.6g}") for key, value in measured[name].items()}
        for name in ("seconds", "cpu_seconds")
    }
    predicted = method.timeline.iteration_seconds
    return {
        "method": method.name,
        "buckets": len(method.plan.buckets),
        "dense": len(method.plan.dense),
        "predicted_seconds": float(f"{predicted:.6g}"),
        "predicted_computation_seconds": float(f"{method.timeline.computation[-1].end:.6g}"),
        "error": float(f"{predicted / per_iteration['seconds']['median'] - 1.0:.4g}"),
        **per_iteration,
        "parts": {name: value for name, value in measured["parts"].items() if name != "other"},
        "facts": measured["facts"],
        "repetitions": measured["repetitions"],
        "bucket_elements": method.bucket_elements,
    }


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Every plan in turn."""
    told: dict[str, Any] = {}
    results = []
    if settings["profile"] is None:
        training = _warmed_up(settings)
        profile = training.optimizer.decision.profile
        facts = training.optimizer._synchronizer.facts.values()
        told = {"elements": sum(fact.num_elements for fact, _ in facts), "parameters": len(facts)}
        told["profile"] = json.loads(profile.to_json())
        results.append(_timed(training, settings["repeat"], profile))
    else:
        profile = Profile.from_json(json.dumps(settings["profile"]))
    for number in range(settings["names"]):
        hvd.allgather(torch.ones(1), name=f"another.{number}")
    for name in settings["methods"]:
        method = Training(name, settings, profile)
        method.prepare()
        results.append(_timed(method, settings["repeat"], profile))
    return {**told, "results": results}


def _timed(method: Training, repeat: int, profile: Profile) -> dict[str, Any]:
    samples = []
    with ranks.no_collection():
        for number in range(repeat):
            sample = timed(method.run, ranks.barrier)
            samples.append(replace(sample, parts=dict(method.parts), facts=method.facts()))
            ranks.say(f"{method.name}, repetition {number + 1} of {repeat}")
    method.describe(profile)
    return _result(method, samples)


if __name__ == "__main__":
    sys.exit(ranks.main(measure))
