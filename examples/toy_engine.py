"""What a front end for a new engine has to write, by the example of processes that talk over pipes.

An engine says which parameters there are, makes parts of them, and carries out requests together with the
other ranks. A training knows when gradients are there; plans, agreement, checkpoints, policies and drift are
`Training`'s. Run it with ``python examples/toy_engine.py --ranks 2 --compression topk:density=0.1``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from horovod_sparse.collectives import Request, Synchronization
from horovod_sparse.feedback import Recipe, parse_recipe
from horovod_sparse.plans import ParameterFacts
from horovod_sparse.simulation.lockstep import answer
from horovod_sparse.telemetry import BucketReport
from horovod_sparse.topology import Placement
from horovod_sparse.training.agreement import ReplicatedArray
from horovod_sparse.training.collective_errors import Outcome
from horovod_sparse.training.engine import Facts, PartSpec, carry_out
from horovod_sparse.training.parts import BucketPart
from horovod_sparse.training.settings import CommonOptions, Settings
from horovod_sparse.training.training import Training

Arrays = dict[str, np.ndarray]


class ArrayPart(BucketPart):
    """A bucket: parameters that are synchronized together."""

    def __init__(self, spec: PartSpec, facts: Facts, place: tuple[int, int]) -> None:
        super().__init__(spec, [facts[name][0].shape for name in spec.names], place, "float32")
        self.num_elements = self.bucket.info.num_elements
        self.total, self.error = None, None

    def gathered(self, gradients: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([gradients[name].reshape(-1) for name in self.names])

    def run(self, step: Synchronization[Any], execute: Callable[[Request], Any]) -> None:
        """Runs a step's coroutine; keeps its error, so that other parts go on as on other ranks."""
        self.total, self.error = None, None
        try:
            self.total = carry_out(step, execute)
        except Exception as error:
            self.error = error

    def given_out(self, total: np.ndarray) -> Arrays:
        spans = enumerate(zip(self.names, self.spans, strict=True))
        return {name: self.shaped(number, total[slice(*span)]) for number, (name, span) in spans}

    def start(self, gradients: Arrays, execute: Callable[[Request], Any]) -> None:
        self.run(self.bucket.step(self.gathered(gradients)), execute)

    def apply(self, scale: float) -> tuple[np.ndarray, BucketReport]:
        applied, total = np.zeros(self.num_elements, np.float32), self.total
        np.add.at(applied, total.indices, total.values * np.float32(scale))  # an index may come twice
        self.bucket.accept()
        report = BucketReport(self.bucket.last, len(total.indices), applied.nbytes, total.notes.norms)
        return applied, report


class PipeEngine:
    """An `Engine` of float32 arrays by name, and of pipes to the other ranks."""

    name = "toy"

    def __init__(
        self, rank: int, pipes: Mapping[int, Connection], parameters: Arrays, recipe: Recipe
    ) -> None:
        self.rank, self.pipes, self.parameters, self.recipe = rank, pipes, parameters, recipe

    def rank_and_size(self) -> tuple[int, int]:
        return self.rank, len(self.pipes) + 1

    def placement(self) -> Placement:
        rank, size = self.rank_and_size()
        return Placement(rank, size, rank, host="here", host_rank=rank)

    def start_token(self) -> object:
        return PipeEngine  # pipes are never made anew

    def facts(self, known: Facts) -> Facts:
        rules, new = self.recipe.rules, {n: a for n, a in self.parameters.items() if n not in known}
        density = {name: rules.density_of(name, array.size) or 0.0 for name, array in new.items()}
        return {n: (ParameterFacts(n, a.size, density=density[n], shape=a.shape), a) for n, a in new.items()}

    def execute(self, request: Request) -> Any:
        """Sends this rank's request to all ranks, and computes its answer from theirs."""
        for pipe in self.pipes.values():
            pipe.send(request)
        everyone = {self.rank: request, **{peer: pipe.recv() for peer, pipe in self.pipes.items()}}
        return answer([everyone[rank] for rank in sorted(everyone)])[self.rank]

    def carry_out(self, coroutine: Synchronization[Any], topology: Any) -> Any:
        return carry_out(coroutine, self.execute)

    def begin(self, training: Training) -> None:
        if training.topology is not None:
            raise NotImplementedError("two levels: this toy knows no hosts")

    def declared(self) -> Mapping[str, object]:
        return {}

    def to_array(self, array: np.ndarray) -> np.ndarray:
        return array.copy()


class ToyTraining(Training):
    """Synchronizes the gradients of one step at a time; options are those of `Settings`."""

    engine: PipeEngine

    def __init__(self, engine: PipeEngine, **options: Any) -> None:
        super().__init__(engine, engine.recipe, Settings.of(options, "the toy", CommonOptions))
        self.begin(engine.facts({}), self.settings.plan or self.plan_for_new(engine.facts({})))

    def make_parts(self, specs: Sequence[PartSpec], facts: Facts) -> list[Any]:
        return [ArrayPart(spec, facts, self.made_for) for spec in specs]

    def synchronize(self, gradients: Arrays) -> Arrays | None:
        """Returns the means over ranks, or None if no rank is to step."""
        self.agree()
        if self.step >= self.drift.next_step:
            entries = [ReplicatedArray(*one) for one in self.engine.parameters.items()]
            self.engine.carry_out(self.drift.compare(self.step, entries), None)
        for part in self.parts:
            part.start(gradients, self.engine.execute)
        verdict = self.policy.judge(self._errors())
        if verdict.error is not None:
            for part in self.parts:
                part.abandon(drop=verdict.drop)
            if verdict.outcome is Outcome.SKIPPED:
                return None
            raise verdict.error
        applied = [part.apply(1.0 / self.size) for part in self.parts]
        self.step += 1
        self.telemetry.record(self.step, [report for _, report in applied], 0.0)
        means: Arrays = {}
        for part, (total, _) in zip(self.parts, applied, strict=True):
            means |= part.given_out(total)
        return means

    def _errors(self) -> list[BaseException]:
        return [part.error for part in self.parts if part.error is not None]


def data_of(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns one rank's inputs and targets of a linear map."""
    inputs = np.random.default_rng(rank).standard_normal((64, 20)).astype(np.float32)
    return inputs, inputs @ np.linspace(-1.0, 1.0, 100, dtype=np.float32).reshape(20, 5)


def gradients_of(parameters: Arrays, inputs: np.ndarray, targets: np.ndarray) -> Arrays:
    error = inputs @ parameters["weight"] + parameters["bias"] - targets
    return {"weight": inputs.T @ error / np.float32(len(inputs)), "bias": error.mean(axis=0)}


def train(rank: int, pipes: Any, text: str, num_steps: int, told: Any, options: Mapping[str, Any]) -> None:
    """Fits the map by SGD, and sends back the parameters and this rank's entry of a checkpoint."""
    inputs, targets = data_of(rank)
    parameters = {"weight": np.zeros((20, 5), np.float32), "bias": np.zeros(5, np.float32)}
    training = ToyTraining(PipeEngine(rank, pipes, parameters, parse_recipe(text)), **options)
    for _ in range(num_steps):
        means = training.synchronize(gradients_of(parameters, inputs, targets))
        for name, mean in (means or {}).items():
            parameters[name] -= np.float32(0.1) * mean
    told.put((rank, parameters, training.save()))


def launch(num_ranks: int, text: str, num_steps: int, **options: Any) -> list[tuple[int, Arrays, Any]]:
    """Starts the ranks as processes; returns what each has sent, in rank order."""
    context = multiprocessing.get_context("spawn")
    pipes: list[dict[int, Any]] = [{} for _ in range(num_ranks)]
    for low, high in itertools.combinations(range(num_ranks), 2):
        pipes[low][high], pipes[high][low] = context.Pipe()
    told = context.Queue()
    for rank in range(num_ranks):
        given = rank, pipes[rank], text, num_steps, told, options
        context.Process(target=train, args=given, daemon=True).start()
    return sorted((told.get(timeout=120) for _ in range(num_ranks)), key=lambda result: result[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--compression", default="topk:density=0.1")
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    for rank, parameters, _ in launch(asked.ranks, asked.compression, asked.steps):
        slope = gradients_of(parameters, *data_of(rank))["weight"]
        print(f"rank {rank}: largest gradient {abs(slope).max():.3g} after {asked.steps} steps")
