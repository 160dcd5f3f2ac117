"""The example of a new front end: it trains on two processes, and equals the simulator bit for bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.feedback import Bucket, parse_recipe
from horovod_sparse.merging import Plan
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.sparsifiers import BucketInfo

PLAN, STEPS, RANKS = Plan((("weight", "bias"),)), 12, 2
EXAMPLES = Path(__file__).parents[3] / "examples"


def simulated(toy: Any, text: str) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Parameters and residuals after the same steps in one process."""
    recipe = parse_recipe(text)
    infos = [BucketInfo("bucket0.weight", 105, rank, RANKS) for rank in range(RANKS)]
    memory = {"density": recipe.sparsifier.density, "companions": recipe.feedback.num_companions}
    buckets = [Bucket(info, recipe, HostAccumulator(105, **memory)) for info in infos]
    parameters = {"weight": np.zeros((20, 5), np.float32), "bias": np.zeros(5, np.float32)}
    for _ in range(STEPS):
        steps = []
        for rank, bucket in enumerate(buckets):
            gradients = toy.gradients_of(parameters, *toy.data_of(rank))
            flat = np.concatenate([gradients["weight"].reshape(-1), gradients["bias"]])
            steps.append(bucket.step(flat))
        total = run_lockstep(steps)[0]
        mean = np.zeros(105, np.float32)
        mean[total.indices] = total.values * np.float32(1.0 / RANKS)
        for bucket in buckets:
            bucket.accept()
        parameters["weight"] -= np.float32(0.1) * mean[:100].reshape(20, 5)
        parameters["bias"] -= np.float32(0.1) * mean[100:]
    return parameters, [np.array(bucket.accumulator.values()) for bucket in buckets]


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


def test_a_new_front_end_is_short() -> None:
    assert len((EXAMPLES / "toy_engine.py").read_text().splitlines()) <= 250
