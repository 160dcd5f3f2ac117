"""What a test knows of an engine: a way to train a model whose gradients it chooses."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.topology import Topology
from support.dyadic import dyadic

__all__ = [
    "RATE",
    "SHAPES",
    "ZEROS",
    "Engine",
    "Ledger",
    "Simulated",
    "given",
    "hosts",
    "pytest_generate_tests",
    "replicas_agree",
    "run",
    "same",
]

SHAPES = {"first": (40, 30), "bias": (7,), "scalar": (), "second": (3, 5, 11), "one": (1,)}
ZEROS = {name: np.zeros(shape) for name, shape in SHAPES.items()}
#: of plain SGD; weights begin at 1
RATE = 0.5

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Engine:
    """A way to train.

    Attributes:
        name: in reports.
        train: a model of plain SGD that trains with a compression (text or recipe) and options; its methods
            are those of `pytorch.TorchTraining`.
        has: of "saved" (states), "adopts" (the user's AdamW), "levels", "nonfinite" (policies), "drift",
            "absent" (gradients of some ranks), "members" (some of the ranks), "types", "device" (memory of
            one), "buckets" (in reach), "models" (that may differ, until ranks compare), "retries" (after an
            error of one rank alone), "scaler"s of a loss, "plans" (of buckets), "merging" by name,
            "horovod"'s arguments, "clips" and others of our optimizer.
        rank: of this process.
        size: number of processes.
        everyone: of a value what all ranks have.
        share: of its cases, from 0 to 1, that are for days: fewer where another engine shows nearly the same.
        only: how the names of tests begin that it takes part in at all.
        measured: the profile of a model of `SHAPES` by a compression; of engines that have "merging".
    """

    name: str
    train: Callable[..., Any]
    has: frozenset[str]
    rank: int
    size: int
    everyone: Callable[[Any], list[Any]]
    share: float = 1.0
    only: tuple[str, ...] = ("test_",)
    measured: Callable[[str], Any] | None = None

    def is_by_day(self, name: str) -> bool:
        return zlib.crc32(name.encode()) % 100 < 100 * self.share


def given(rank: int, step: int, shapes: Mapping[str, Sequence[int]] = SHAPES) -> dict[str, np.ndarray]:
    """One rank's gradients: sums of them are exact in any order."""
    return {name: dyadic(shape, rank, step, name) for name, shape in shapes.items()}


def replicas_agree(engine: Engine, training: Any) -> bool:
    own = {name: values.tobytes() for name, values in training.weights().items()}
    return all(theirs == own for theirs in engine.everyone(own))


class Simulated:
    """The simulator beside a training: weights and what is held back, bit for bit."""

    def __init__(
        self, engine: Engine, recipe: Any, *, topology: Topology | None = None, size: int | None = None
    ) -> None:
        self._engine, self._recipe, self._topology = engine, recipe, topology
        self._size = size or engine.size
        self._weights = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
        self._clusters: dict[Any, SimulatedCluster] = {}

    def step(self, training: Any, everyone: Sequence[Arrays]) -> None:
        """The same step here; compares weights after it. Buckets are known once there has been one."""
        if not self._clusters:
            for part in training.parts:
                whole = getattr(part.bucket, "whole", None) or part.bucket.info
                recipe = self._recipe.for_parameter(part.names[0], np.size(self._weights[part.names[0]]))
                self._clusters[tuple(part.names)] = SimulatedCluster(
                    recipe,
                    whole.num_elements,
                    self._size,
                    name=whole.name,
                    number=whole.number,
                    topology=self._topology,
                )
        found, rate = training.weights(), RATE
        if self._recipe.feedback.applies_rate:  # what comes back is a step
            rate = 1.0
        for names, cluster in self._clusters.items():
            inputs = [flat(gradients, names).astype(np.float32) for gradients in everyone]
            mean, start = cluster.step(inputs, RATE) * np.float32(1.0 / self._size), 0
            for name in names:
                weights = self._weights[name]
                piece = mean[start : start + weights.size].reshape(weights.shape)
                self._weights[name], start = weights - np.float32(rate) * piece, start + weights.size
                if self._size in (1, 2, 4):
                    np.testing.assert_array_equal(found[name], self._weights[name], name)
                else:  # an average by 3 rounds otherwise where each rank's share is rounded
                    np.testing.assert_allclose(found[name], self._weights[name], rtol=1e-5, atol=1e-5)

    def check_held(self, training: Any, rank: int) -> None:
        held = training.held()
        for names, cluster in self._clusters.items():
            np.testing.assert_array_equal(flat(held, names), cluster.residuals()[rank])


def flat(arrays: Arrays, names: Sequence[str]) -> np.ndarray:
    return np.concatenate([np.asarray(arrays[name]).reshape(-1) for name in names])


@dataclass
class Ledger:
    """Law 1 over a training: what all ranks were given was applied, or is held back."""

    engine: Engine
    total: dict[str, np.ndarray] = field(default_factory=dict)

    def enter(self, gradients: Arrays) -> None:
        for name, values in gradients.items():
            self.total[name] = self.total.get(name, 0.0) + np.asarray(values, np.float64)

    def balance(self, training: Any, atol: float = 1e-4) -> None:
        held, size = training.held(), self.engine.size
        both = self.engine.everyone([self.total, held])
        for name, weights in training.weights().items():
            given_, waiting = (
                sum(np.asarray(one[i].get(name, 0.0)).reshape(-1) for one in both) / size for i in (0, 1)
            )
            applied = (1.0 - weights.reshape(-1)) / RATE
            np.testing.assert_allclose(applied + waiting, given_ + np.zeros(weights.size), rtol=0, atol=atol)


def run(training: Any, engine: Engine, steps: Any) -> None:
    for step in steps:
        training.step(given(engine.rank, step))


def same(one: Any, other: Any) -> bool:
    pairs = ((one.weights(), other.weights()), (one.held(), other.held()))
    return all(np.array_equal(flat(a, list(b)), flat(b, list(b))) for a, b in pairs)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames:
        needed = {one for mark in metafunc.definition.iter_markers("needs") for one in mark.args}
        name = metafunc.definition.originalname
        engines = [one for one in metafunc.module.ENGINES if needed <= one.has and name.startswith(one.only)]
        metafunc.parametrize("engine", engines, ids=[engine.name for engine in engines])


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch, size: int) -> Topology:
    per_host = 2 if size % 2 == 0 else size
    monkeypatch.setenv("HOROVOD_SPARSE_RANKS_PER_HOST", str(per_host))
    return Topology.regular(size // per_host, per_host)
