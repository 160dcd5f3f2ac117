"""Several steps of one case on simulated ranks, and everything that the laws look at."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from horovod_sparse.errors import NonFiniteGradientError
from horovod_sparse.feedback import Recipe
from horovod_sparse.simulation import Recorder, SimulatedCluster
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.topology import Topology
from support.gradients import as_gradient, gaussian, wide


@dataclass(frozen=True)
class Scenario:
    """How many ranks, how many elements, of which dtype; on how many hosts, where there are two levels."""

    size: int
    num_elements: int
    dtype: str = "float32"
    num_steps: int = 4
    hosts: int = 0

    def __str__(self) -> str:
        ranks = f"P{self.size}" if self.topology is None else f"N{self.hosts}-L{self.topology.per_host}"
        return f"{ranks}-n{self.num_elements}-{self.dtype}"

    @property
    def topology(self) -> Topology | None:
        """Which ranks share a host; None where there is one level."""
        return Topology.regular(self.hosts, self.size // self.hosts) if self.hosts else None

    def cluster(self, recipe: Recipe) -> SimulatedCluster:
        return SimulatedCluster(recipe, self.num_elements, self.size, self.dtype, topology=self.topology)


@dataclass
class Step:
    """What came out of one step: a sum per rank, or the error that each raised; residuals; traffic."""

    results: list[SparseSum | Exception]
    residuals: list[np.ndarray]
    recorder: Recorder

    @property
    def sums(self) -> list[SparseSum]:
        """The sums of all ranks, where the step was not abandoned."""
        for result in self.results:
            if isinstance(result, Exception):
                raise result
        return self.results  # type: ignore[return-value]

    @property
    def abandoned(self) -> bool:
        return any(isinstance(result, Exception) for result in self.results)


@dataclass
class History:
    """A run: float64 gradients [steps, P, n] as ranks were given them, and the cluster as it ended."""

    recipe: Recipe
    scenario: Scenario
    gradients: np.ndarray
    cluster: SimulatedCluster
    steps: list[Step] = field(default_factory=list)

    def dense(self, step: int, rank: int = 0) -> np.ndarray:
        """The synchronized gradient (a sum) of one step on one rank, as float64."""
        out = np.zeros(self.scenario.num_elements)
        sum_ = self.steps[step].sums[rank]
        np.add.at(out, sum_.indices, sum_.values.astype(np.float64))
        return out


def random_gradients(
    scenario: Scenario, draw: Callable[[np.random.Generator, Any], np.ndarray] = gaussian, seed: int = 0
) -> np.ndarray:
    generator = np.random.default_rng([seed, scenario.size, scenario.num_elements])
    return draw(generator, (scenario.num_steps, scenario.size, scenario.num_elements))


def run(
    recipe: Recipe,
    scenario: Scenario,
    gradients: np.ndarray,
    cluster: SimulatedCluster | None = None,
    rates: Sequence[float] | None = None,
) -> History:
    """Steps of gradients [steps, P, n], rounded to the scenario's dtype; on a fresh cluster by default."""
    cluster = cluster or scenario.cluster(recipe)
    given = [[as_gradient(values, scenario.dtype) for values in step] for step in gradients]
    exact = np.array([[wide(gradient) for gradient in step] for step in given])
    history = History(recipe, scenario, exact.reshape(gradients.shape), cluster)
    for number, step in enumerate(given):
        cluster.recorder = Recorder()
        results = cluster.synchronize(step, None if rates is None else rates[number], keep_errors=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, NonFiniteGradientError):
                raise result
        assert all(not gradient.any() for gradient in step), "a fold leaves zeros in the gradient"
        history.steps.append(Step(copy.deepcopy(results), cluster.residuals(), cluster.recorder))
    return history
