"""States of an engine that knows no framework: what shared code asks of one is all that there is."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from horovod_sparse.errors import ArgumentError, StateMismatchError
from horovod_sparse.feedback import MomentumCorrection, Recipe, parse_recipe, recipe
from horovod_sparse.merging import Plan
from horovod_sparse.simulation import SimulatedCluster, run_lockstep
from horovod_sparse.tensors.layout import redistribute
from horovod_sparse.training import parts, state
from horovod_sparse.training.encoding import from_bytes, to_bytes
from horovod_sparse.training.engine import PartSpec

SHAPES = {"w": (4, 6), "b": (6,), "v": (10,)}


def array_part(names: tuple[str, ...], recipe: Recipe, place: tuple[int, int], *, dense: bool = False) -> Any:
    spec = PartSpec(names[0], names, recipe, dense)
    return parts.BucketPart(spec, [SHAPES[name] for name in names], place, "float32")


class ArrayEngine:
    def __init__(self, recipe: Recipe, plan: Plan, place: tuple[int, int]) -> None:
        self.recipe, self.plan, self.rank_and_size, self.step = recipe, plan, place, 0
        self.sparse = [array_part(names, recipe, place) for names in plan.buckets]
        dense = (array_part((name,), recipe.for_dense(), place, dense=True) for name in plan.dense)
        self.parts: list[parts.BucketPart] = [*self.sparse, *dense]

    def topology_for(self, entry: Any) -> None:
        """One level."""

    def residuals_and_progress(self) -> Any:
        progress = {name: part.bucket.progress for part in self.sparse for name in part.names}
        return parts.residuals_by_parameter(self.parts, self.recipe.feedback.num_companions), progress

    def load_residuals(self, arrays: Any, progress: Any) -> None:
        parts.assign_residuals(self.parts, arrays, progress)


ONE = Plan((("w", "b", "v"),))
TWO = Plan((("b", "v"),), ("w",))
RECIPES = [recipe("topk", density=0.1), recipe("dgc", density=0.1, feedback=MomentumCorrection())]


def trained(how: Recipe, plan: Plan, size: int) -> list[Any]:
    engines = [ArrayEngine(how, plan, (rank, size)) for rank in range(size)]
    generator = np.random.default_rng(0)
    for _ in range(3):
        for number in range(len(plan.buckets)):
            buckets = [engine.sparse[number].bucket for engine in engines]
            drawn = generator.standard_normal((size, buckets[0].info.num_elements)).astype(np.float32)
            run_lockstep([bucket.step(own) for bucket, own in zip(buckets, drawn, strict=True)])
            for bucket in buckets:
                bucket.accept()
        for engine in engines:
            engine.step += 1
    return list(engines)


@pytest.mark.parametrize("how", RECIPES, ids=lambda how: how.sparsifier.name)
def test_residuals_survive_another_plan_and_another_number_of_ranks(how: Recipe) -> None:
    entries = [state.saved_entry(engine) for engine in trained(how, ONE, 2)]
    entries[0]["buckets"][0]["leans"] = alike = 0.5, 1.0
    same_size, alone, fresh = (ArrayEngine(how, TWO, (0, size)) for size in (2, 1, 1))
    state.load_entry(same_size, entries[0], 1.0)
    state.load_entry(alone, entries[0], state.residual_factor(0, 2, 1))
    state.load_entry(fresh, state.redistributed(entries, 0, 1), state.residual_factor(0, 1, 1))
    leans = [engine.sparse[0].bucket.progress.leans for engine in (same_size, alone, fresh)]
    assert leans == [alike, (0.0, 0.0), (0.0, 0.0)], "ranks are as alike as they were, but no other number"
    kept = state.saved_entry(fresh)
    for name in SHAPES:  # the mean, and the dense one's for its next gradient
        mean = (entries[0]["residuals"][name] + entries[1]["residuals"][name]) / 2
        np.testing.assert_allclose(kept["residuals"][name], mean, rtol=1e-6, atol=1e-7)
    assert (fresh.step, kept["step"], kept["plan"]) == (3, 3, TWO.to_dict())
    assert [one["state"]["step"] for one in kept["buckets"]] == [3]


def test_what_cannot_be_saved_or_loaded_is_refused() -> None:
    engine, *_ = trained(RECIPES[0], ONE, 1)
    entry = state.saved_entry(engine)
    with pytest.raises(StateMismatchError, match=r"the saved state is of topk.*, now dgc"):
        state.check_entry(entry, RECIPES[1], "now {} is used")
    with pytest.raises(StateMismatchError, match="format 1"):
        state.check_entry({**entry, "format": 1}, RECIPES[0], "{}")
    with pytest.raises(StateMismatchError, match="object"):
        to_bytes({"it": object()})
    for data in (b"nonsense", b"", to_bytes({"a": np.ones(100)})[:-50]):
        with pytest.raises(StateMismatchError, match="cannot be read"):
            from_bytes(data)
    for given in (entries(3)[:2], [*entries(2), entries(3)[2]], entries(2)[:1] * 2):
        with pytest.raises(StateMismatchError, match="every rank"):
            redistribute(given, 0, 2)
    with pytest.raises(ArgumentError, match="rank=4"):
        redistribute(entries(2), 4, 4)


def entries(size):
    draw = np.random.default_rng(size).standard_normal
    return [
        {
            "rank": rank,
            "size": size,
            "feedback": "error",
            "residuals": {name: torch.from_numpy(draw(5)) for name in "ab"},
            "companions": [{"a": torch.from_numpy(draw(5))}],
        }
        for rank in range(size)
    ]


PLAN, STEPS, RANKS = Plan((("weight", "bias"),)), 12, 2
EXAMPLES = Path(__file__).parents[3] / "examples"


def simulated(toy: Any, text: str) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    cluster = SimulatedCluster(parse_recipe(text), 105, RANKS, name="bucket0.weight")
    parameters = {"weight": np.zeros((20, 5), np.float32), "bias": np.zeros(5, np.float32)}
    for _ in range(STEPS):
        given = [toy.gradients_of(parameters, *toy.data_of(rank)) for rank in range(RANKS)]
        total = cluster.step([np.concatenate([one["weight"].reshape(-1), one["bias"]]) for one in given])
        mean = total * np.float32(1.0 / RANKS)
        parameters["weight"] -= np.float32(0.1) * mean[:100].reshape(20, 5)
        parameters["bias"] -= np.float32(0.1) * mean[100:]
    return parameters, cluster.residuals()


@pytest.mark.parametrize("text", ["topk:density=0.1", "exdyna:density=0.1,feedback=momentum"])
def test_the_toy_engine_equals_the_simulator_bit_for_bit(text: str, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    toy = importlib.import_module("toy_engine")
    parameters, residuals = simulated(toy, text)
    results = toy.launch(RANKS, text, STEPS, plan=PLAN, check_every=5)
    assert len(results) == RANKS
    for (rank, found, entry), residual in zip(results, residuals, strict=True):
        for name, values in parameters.items():
            assert np.array_equal(found[name], values), name
        kept = np.concatenate([entry["residuals"]["weight"].reshape(-1), entry["residuals"]["bias"]])
        assert np.array_equal(kept, residual)
        assert (entry["rank"], entry["size"], entry["step"]) == (rank, RANKS, STEPS)
