"""States of an engine that knows no framework: what shared code asks of one is all that there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.errors import StateMismatchError
from horovod_sparse.feedback import Bucket, MomentumCorrection, Recipe, recipe
from horovod_sparse.frontend.engine import Engine
from horovod_sparse.frontend.parts import BucketPart, DensePart, Part
from horovod_sparse.frontend.state import check_entry, load_entry, redistributed, saved_entry, share_factor
from horovod_sparse.merging import Plan
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.sparsifiers import BucketInfo

SHAPES = {"w": (4, 6), "b": (6,), "v": (10,)}


class Laid:
    names: tuple[str, ...]

    @property
    def places(self) -> list[tuple[int, int]]:
        stops = np.cumsum([np.prod(SHAPES[name]) for name in self.names]).tolist()
        return list(zip([0, *stops[:-1]], stops, strict=True))

    def shaped(self, number: int, values: np.ndarray) -> np.ndarray:
        return np.array(values).reshape(SHAPES[self.names[number]])

    def flat(self, number: int, values: Any) -> np.ndarray:
        return np.asarray(values).reshape(-1)


class ArrayBucket(Laid, BucketPart):
    dense = False

    def __init__(self, names: tuple[str, ...], recipe: Recipe, place: tuple[int, int]) -> None:
        self.names = names
        info = BucketInfo(names[0], self.places[-1][1], *place)
        companions = recipe.feedback.num_companions
        memory = HostAccumulator(info.num_elements, density=recipe.sparsifier.density, companions=companions)
        self.bucket = Bucket(info, recipe, memory)


class ArrayDense(Laid, DensePart):
    def __init__(self, name: str) -> None:
        self.names, self.dtype, self.num_elements = (name,), "float32", int(np.prod(SHAPES[name]))


class ArrayEngine:
    """Buckets of NumPy arrays on one of several simulated ranks."""

    topology = None

    def __init__(self, recipe: Recipe, plan: Plan, place: tuple[int, int]) -> None:
        self.recipe, self.plan, self.place, self.step = recipe, plan, place, 0
        self.topology = None
        self.sparse = [ArrayBucket(names, recipe, place) for names in plan.buckets]
        self.parts: list[Part] = [*self.sparse, *(ArrayDense(name) for name in plan.dense)]


ONE = Plan((("w", "b", "v"),))
TWO = Plan((("b", "v"),), ("w",))
RECIPES = [recipe("topk", density=0.1), recipe("dgc", density=0.1, feedback=MomentumCorrection())]


def trained(how: Recipe, plan: Plan, size: int) -> list[Engine]:
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


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return np.array_equal(left, right)


@pytest.mark.parametrize("how", RECIPES, ids=lambda how: how.sparsifier.name)
def test_the_same_plan_goes_on_bit_for_bit(how: Recipe) -> None:
    for engine in trained(how, ONE, 2):
        entry, fresh = saved_entry(engine), ArrayEngine(how, ONE, engine.place)
        check_entry(entry, how, "{}")
        load_entry(fresh, entry, 1.0)
        assert same(saved_entry(fresh), entry) and np.any(entry["residuals"]["w"])


@pytest.mark.parametrize("how", RECIPES, ids=lambda how: how.sparsifier.name)
def test_residuals_survive_another_plan_and_another_number_of_ranks(how: Recipe) -> None:
    entries = [saved_entry(engine) for engine in trained(how, ONE, 2)]
    fresh = ArrayEngine(how, TWO, (0, 1))
    load_entry(fresh, redistributed(entries, 0, 1), share_factor(0, 1, 1))
    kept = saved_entry(fresh)
    for name in SHAPES:  # the mean, and the dense one's for its next gradient
        mean = (entries[0]["residuals"][name] + entries[1]["residuals"][name]) / 2
        np.testing.assert_allclose(kept["residuals"][name], mean, rtol=1e-6, atol=1e-7)
    assert (fresh.step, kept["step"], kept["plan"]) == (3, 3, TWO.to_dict())
    assert [one["state"]["step"] for one in kept["buckets"]] == [3]


def test_names_may_be_others_and_algorithms_may_not() -> None:
    engine, *_ = trained(RECIPES[0], ONE, 1)
    entry, fresh = saved_entry(engine), ArrayEngine(RECIPES[0], ONE, (0, 1))
    other = {
        **entry,
        "plan": Plan((("x", "b", "v"),)).to_dict(),
        "residuals": {"x" if name == "w" else name: values for name, values in entry["residuals"].items()},
    }
    load_entry(fresh, other, 1.0, {"x": "w", "b": "b", "v": "v"})
    assert same(saved_entry(fresh), entry)
    with pytest.raises(StateMismatchError, match=r"the saved state is of topk.*, now dgc"):
        check_entry(entry, RECIPES[1], "now {} is used")
    with pytest.raises(StateMismatchError, match="format 2"):
        check_entry({**entry, "format": 2}, RECIPES[0], "{}")
