"""`scripts/bench merging`: iterations under several plans across hosts, predicted and measured.

The network is a layer table at a quarter of its sizes and times, whose computing is slept through.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

import horovod_sparse.torch as hvd
from benchmarks.common import ranks
from benchmarks.common.hosts import cluster_for
from benchmarks.common.layers import LAYER_TABLES
from benchmarks.common.options import count, hosts_parser, launch
from benchmarks.common.replay import Replay
from benchmarks.common.tables import hosts_table
from horovod_sparse.merging import Profile, fixed, predict

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
#: iterations of a fresh network before those that count
_FIRST_ITERATIONS = 4
#: the training that measured goes on under the plan it decided for, without another launch
GOES_ON = "optimal, same launch"

tables = hosts_table


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = hosts_parser("merging", __doc__)
    made.set_defaults(density=0.01, hosts=[4], repeat=7)
    add = made.add_argument
    add("--model", choices=LAYER_TABLES, default="resnet50", help="(default %(default)s)")
    text = "with commas between, but for 'cost, optimal', which is one (default: all)"
    add("--methods", type=_methods, default=tuple(METHODS), metavar="NAMES", help=text)
    add("--iterations", type=count, default=5, help="in a repetition (default %(default)s)")
    text = "other names that Horovod has seen before anything is measured (default %(default)s)"
    add("--names", type=int, default=0, help=text)
    return made


def _methods(text: str) -> tuple[str, ...]:
    """Parses names of `METHODS`.

    Example:
        >>> _methods("single,cost, optimal,optimal")
        ('single', 'optimal', 'cost, optimal')
    """
    found = [name.replace(";", ",") for name in text.replace("cost, ", "cost; ").split(",")]
    if not set(found) <= METHODS.keys():
        raise argparse.ArgumentTypeError(f"{text!r} is not some of {'; '.join(METHODS)}")
    return tuple(name for name in METHODS if name in found)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything that the command line asks for; returns what is written to JSON.

    One launch measures, and goes on with the plan of ``merging="optimal"``. Then every plan has a launch of
    its own, as a training that was given the profile. In one process after the other plans it would be
    slower: Horovod's cycles take the longer the more names it has ever seen.
    """
    settings = {name: getattr(options, name) for name in ("model", "repeat", "iterations")}
    settings["sparsifiers"] = {"topk": f"topk:density={options.density}"}
    (num_ranks,), (network,) = options.hosts, options.networks or ["gloo"]
    with cluster_for(num_ranks, options.rate) as hosts:

        def run(profile: Any, methods: Sequence[str], names: int) -> dict[str, Any]:
            asked = {**settings, "profile": profile, "methods": list(methods), "names": names}
            how = {"network": network, "num_ranks": num_ranks}
            return launch("benchmarks.merging", asked, options, hosts, **how)

        first = run(None, [], 0)
        others = [run(first["profile"], [method], options.names) for method in options.methods]
    results = [item for one in (first, *others) for item in one["results"]]
    return {"model": options.model, **first, "results": results}


class Training(ranks.Measurable):
    """Trains a network under one plan; a repetition is several iterations.

    Args:
        name: in results.
        settings: of the measurement.
        profile: of the cluster and the network; None: it is measured first.
    """

    num_warmup = 0

    def __init__(self, name: str, settings: dict[str, Any], profile: Profile | None) -> None:
        self.name, self.iterations, self.parts = name, settings["iterations"], {}
        # what ranks compute differs, and so do their weights, which nobody looks at: to make them equal would
        # take longer than many iterations
        torch.manual_seed(hvd.rank())
        self._model = Replay(settings["model"], _SCALE)
        named = list(self._model.named_parameters())
        # small, so that the sleeping network does not run away
        sgd = torch.optim.SGD(self._model.parameters(), lr=1e-6)
        self._sparsifier = hvd.Compression.parse(settings["sparsifiers"]["topk"])
        arguments = METHODS["optimal" if profile is None else name]
        if profile is None:
            profile = hvd.measured_profile(self._model, named, self._sparsifier)
        if arguments.get("merging") in ("omgs", "optimal") or "cost" in name:
            arguments = {**arguments, "profile": profile}
        self.optimizer = hvd.DistributedOptimizer(sgd, named, self._sparsifier, **arguments)
        for _ in range(_FIRST_ITERATIONS):
            self._iterate()

    def run(self) -> None:
        self.parts = {}
        for _ in range(self.iterations):
            self._iterate()

    def _iterate(self) -> None:
        found = ranks.iterate(self.optimizer, self._model)
        for part, seconds in found.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds / self.iterations

    def facts(self) -> dict[str, float]:
        """Returns the last iteration's seconds by part, beside backward."""
        last = self.optimizer.telemetry.last
        names = ("fold_seconds", "select_seconds", "wait_seconds", "apply_seconds", "bytes_sent")
        return {name: float(getattr(last, name)) for name in names}

    def result(self, repeat: int, profile: Profile) -> dict[str, Any]:
        """Returns the measured iteration, and the one that the profile predicts."""
        measured = ranks.measure_methods([self], repeat)[self.name]
        per_iteration = {
            name: {key: float(f"{value / self.iterations:.6g}") for key, value in measured[name].items()}
            for name in ("seconds", "cpu_seconds")
        }
        synchronizer, plan = self.optimizer._synchronizer, self.optimizer.plan
        facts = {name: fact for name, (fact, _) in synchronizer.facts.items()}
        chosen = self._sparsifier.recipe.sparsifier
        workload, cost = profile.workload_and_cost(list(facts.values()), chosen, hvd.size())
        timeline = predict(workload, plan, cost)
        predicted = timeline.iteration_seconds
        return {
            "method": self.name,
            "buckets": len(plan.buckets),
            "dense": len(plan.dense),
            "predicted_seconds": float(f"{predicted:.6g}"),
            "predicted_computation_seconds": float(f"{timeline.computation[-1].end:.6g}"),
            "error": float(f"{predicted / per_iteration['seconds']['median'] - 1.0:.4g}"),
            **per_iteration,
            "parts": {name: value for name, value in measured["parts"].items() if name != "other"},
            "facts": measured["facts"],
            "repetitions": measured["repetitions"],
            "bucket_elements": [sum(facts[name].num_elements for name in names) for names in plan.buckets],
        }


def on_rank(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures every plan in turn; without a profile measures one first. Called on every rank."""
    repeat = settings["repeat"]
    if settings["profile"] is None:
        training = Training(GOES_ON, settings, None)
        profile = training.optimizer.decision.profile
        facts = training.optimizer._synchronizer.facts.values()
        return {
            "elements": sum(fact.num_elements for fact, _ in facts),
            "parameters": len(facts),
            "profile": json.loads(profile.to_json()),
            "results": [training.result(repeat, profile)],
        }
    profile = Profile.from_json(json.dumps(settings["profile"]))
    for number in range(settings["names"]):
        hvd.allgather(torch.ones(1), name=f"another.{number}")
    trainings = (Training(name, settings, profile) for name in settings["methods"])
    return {"results": [training.result(repeat, profile) for training in trainings]}
