"""The low-pass filter of the residual, against ScaleCom's equation written out."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from horovod_sparse.arrays import GradientParts, HostAccumulator
from horovod_sparse.errors import ArgumentError, NonFiniteGradientError
from horovod_sparse.feedback import ErrorFeedback, LowPass, MomentumCorrection, Recipe, parse_recipe, recipe
from horovod_sparse.frontend.state import companions_fit, redistributed
from horovod_sparse.pytorch.accumulator import TorchAccumulator
from horovod_sparse.pytorch.gradients import KeptTensor
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers.dense import Dense
from support.gradients import DTYPES, dyadic, gaussian
from support.history import Scenario, random_gradients, run
from support.reference import ReferenceAccumulator

_N, _K = 40, 4


def largest(values: np.ndarray) -> np.ndarray:
    return np.argsort(-np.abs(values), kind="stable")[:_K]


def by_the_equation(
    gradients: np.ndarray, beta: float, leader: bool
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sums, and filtered residuals m [P, n], of every step: m' = (1 - beta) m + beta (m + g - sent)."""
    filtered = np.zeros(gradients.shape[1:])
    sums, residuals = [], []
    for step, gradient in enumerate(gradients):
        accumulators = filtered + gradient
        sent = np.zeros_like(accumulators)
        for rank, accumulator in enumerate(accumulators):
            chosen = largest(accumulators[step % len(gradient)] if leader else accumulator)
            sent[rank, chosen] = accumulator[chosen]
        filtered = (1 - beta) * filtered + beta * (filtered + gradient - sent)
        sums.append(sent.sum(0))
        residuals.append(filtered)
    return sums, residuals


@pytest.mark.parametrize("memory", [HostAccumulator, ReferenceAccumulator])
@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["cltk", "topk"])
def test_the_equation(name: str, size: int, beta: float, memory: type) -> None:
    gradients = gaussian(np.random.default_rng(1), (9, size, _N))
    sums, filtered = by_the_equation(gradients, beta, leader=name == "cltk")
    made = recipe(name, density=_K / _N, feedback=LowPass(beta=beta))
    history = run(made, Scenario(size, _N, "float64", num_steps=9), gradients, memory)
    for number, (total, residual) in enumerate(zip(sums, filtered, strict=True)):
        np.testing.assert_allclose(history.dense(number), total, rtol=0, atol=1e-12)
        held = np.array(history.steps[number].residuals)
        np.testing.assert_allclose(beta * held, residual, rtol=0, atol=1e-12)


def test_one_step_by_hand() -> None:
    """k = 1, beta = 0.25: what is held back is the sum of gradients less what was sent."""
    cluster = SimulatedCluster(recipe("topk", density=0.25, feedback=LowPass(beta=0.25)), 4, 1)
    cluster.synchronize([np.array([8, 4, -2, 0], np.float32)])
    assert cluster.residuals()[0].tolist() == [0, 4, -2, 0]  # m = 0, 1, -0.5, 0
    sum_ = cluster.synchronize([np.array([1, 2, 0, 0], np.float32)])[0]
    assert (sum_.indices.tolist(), sum_.values.tolist()) == ([1], [3])  # acc = 1, 3, -0.5, 0
    assert cluster.residuals()[0].tolist() == [1, 3, -2, 0]  # 0.75 of m = 1 stay, over beta
    assert cluster.buckets[0].last.residual_norm == pytest.approx(14**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ["cltk", "gtopk:values=float16", "spardl", "topk_dsa", "exdyna:values=int8"])
def test_beta_1_is_error_feedback(text: str, dtype: str) -> None:
    scenario = Scenario(3, 200, dtype, num_steps=5)
    gradients, made = random_gradients(scenario), parse_recipe(text)
    filtered = run(Recipe(made.sparsifier, LowPass(beta=1.0)), scenario, gradients)
    plain = run(Recipe(made.sparsifier, ErrorFeedback()), scenario, gradients)
    for step, other in zip(filtered.steps, plain.steps, strict=True):
        assert step.sums[0].values.tobytes() == other.sums[0].values.tobytes()
        assert step.sums[0].norms == pytest.approx(other.sums[0].norms, rel=1e-5, abs=1e-5)
        np.testing.assert_array_equal(step.residuals, other.residuals)


@pytest.mark.parametrize(
    "text", ["cltk", "gtopk", "spardl:residuals=partial", "oktopk", "topk_dsa:values=int8"]
)
def test_telemetry_speaks_of_what_is_held_back(text: str) -> None:
    made = Recipe(parse_recipe(text).sparsifier, LowPass(beta=0.25))
    cluster = SimulatedCluster(made, 300, 3)
    before = [0.0] * 3
    for gradients in gaussian(np.random.default_rng(2), (4, 3, 300)).astype(np.float32):
        sum_ = cluster.synchronize([*gradients])[0]
        if sum_.norms is not None:
            np.testing.assert_allclose(sum_.norms, before, rtol=1e-5)
        before = [float(np.linalg.norm(held)) for held in cluster.residuals()]
        norms = [bucket.last.residual_norm for bucket in cluster.buckets]
        np.testing.assert_allclose(norms, before, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-40, 1e-25, 1.0, 1e25, 1e36])
def test_norms_of_any_size(scale: float) -> None:
    """Where squares are no numbers of float32, and where one part of the bucket is."""
    gradient = np.random.default_rng(4).standard_normal(20_000)
    gradient[8192:] *= scale
    accumulator = HostAccumulator(20_000, companions=1)
    accumulator.fold(gradient.astype(np.float32), low_pass=0.25)
    expected = float(np.square(gradient.astype(np.float32), dtype=np.float64).sum())
    assert accumulator.square_norm == pytest.approx(expected, rel=1e-5)
    accumulator.clear(np.arange(8192, dtype=np.int32))
    accumulator.clear(np.arange(20_000, dtype=np.int32))
    assert accumulator.square_norm == pytest.approx(0.0, abs=1e-9 * expected)


@pytest.mark.parametrize("memory", [HostAccumulator, ReferenceAccumulator])
def test_an_abandoned_step_gives_all_of_it_back(memory: type) -> None:
    made = Recipe(parse_recipe("gtopk:density=0.1").sparsifier, LowPass(beta=0.5))
    cluster = SimulatedCluster(made, _N, 2, accumulator=memory)
    first, sick = dyadic(np.random.default_rng(3), (2, 2, _N)).astype(np.float32)
    cluster.synchronize([*first.copy()])
    before = np.array(cluster.residuals())
    sick[1, 7] = np.nan
    errors = cluster.synchronize([*sick.copy()], keep_errors=True)
    assert all(isinstance(error, NonFiniteGradientError) for error in errors)
    np.testing.assert_array_equal(cluster.residuals(), before + np.nan_to_num(sick))


def test_the_residual_follows_the_learning_rate() -> None:
    made = recipe("topk", density=0.25, feedback=LowPass(beta=0.5, scale_residual=True))
    cluster = SimulatedCluster(made, 4, 1)
    cluster.synchronize([np.array([8, 1, 1, 1], np.float32)], 0.5)
    cluster.synchronize([np.array([9, 0, 0, 1], np.float32)], 0.25)
    assert cluster.residuals()[0].tolist() == [0, 2, 2, 3]
    assert cluster.buckets[0].last.global_error == pytest.approx(12**0.5)  # of (0, 2, 2, 2)


def test_clt_k_survives_a_large_learning_rate() -> None:
    """What the filter is for: a quadratic with noise, on which plain error feedback diverges."""
    curvature, losses = np.linspace(0.1, 1.0, 300), []
    for beta in (1.0, 0.1):
        cluster = SimulatedCluster(recipe("cltk", density=0.02, feedback=LowPass(beta=beta)), 300, 4)
        generator, point = np.random.default_rng(0), np.ones(300)
        for _ in range(400):
            gradients = curvature * point + generator.standard_normal((4, 300))
            point -= 0.2 * cluster.step([*gradients.astype(np.float32)]) / 4
        losses.append(0.5 * float(np.dot(curvature, point**2)))
    start = 0.5 * curvature.sum()
    assert losses[1] < start < 1e3 * start < losses[0]


def test_what_is_sent_whole_is_not_filtered() -> None:
    """A parameter that becomes dense sends all that was held back with its next gradient."""
    made = recipe("topk", density=0.25, feedback=LowPass(beta=0.1, clip_norm=100.0), dense=("bias",))
    dense = made.for_parameter("bias", 4)
    assert dense == Recipe(Dense(), LowPass(beta=1.0, clip_norm=100.0))
    cluster = SimulatedCluster(dense, 4, 1)
    cluster.buckets[0].accumulator.companions[0][...] = [0.0, 1.0, 2.0, 3.0]  # type: ignore[attr-defined]
    first = np.array([0.1, 0.2, 0.3, 0.7], np.float32)
    np.testing.assert_array_equal(cluster.step([first.copy()]), first + np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(cluster.step([first.copy()]), first)
    assert not cluster.residuals()[0].any() and cluster.buckets[0].last.residual_norm == 0.0


@pytest.mark.parametrize("clip_norm", [None, 2.0])
def test_a_dropped_gradient_leaves_what_is_held_back(clip_norm: float | None) -> None:
    first, bad = gaussian(np.random.default_rng(5), (2, 700)).astype(np.float32)
    bad[5], bad[6] = np.nan, np.inf
    on_host = HostAccumulator(700, density=0.1, companions=1)
    on_device = TorchAccumulator(700, density=0.1, companions=1, device="cpu")
    for accumulator in (on_host, on_device):
        accumulator: Any
        kept = [
            GradientParts([gradient]) if accumulator is on_host else KeptTensor(torch.from_numpy(gradient))
            for gradient in (first, bad)
        ]
        accumulator.fold(kept[0], low_pass=0.25, clip_norm=clip_norm)
        accumulator.clear(accumulator.largest(70))
        held = accumulator.residual().copy()
        accumulator.fold(kept[1], low_pass=0.25, clip_norm=clip_norm)
        accumulator.clear(accumulator.largest(70))
        accumulator.abandon()
        accumulator.drop(kept[1])
        np.testing.assert_allclose(accumulator.residual(), held, rtol=1e-5, atol=1e-5)
        assert accumulator.square_norm == pytest.approx(float(np.square(held, dtype=float).sum()), rel=1e-4)
    np.testing.assert_array_equal(on_host.residual(), on_device.residual())


@pytest.mark.parametrize("sizes", [(3, 2), (2, 4), (4, 1)])
def test_the_mean_is_kept_at_another_size(sizes: tuple[int, int]) -> None:
    before, after = sizes
    cluster = SimulatedCluster(recipe("cltk", density=0.1, feedback=LowPass(beta=0.25)), _N, before)
    cluster.synchronize([*gaussian(np.random.default_rng(6), (before, _N)).astype(np.float32)])
    entries: list[dict[str, Any]] = [
        {
            "rank": rank,
            "size": before,
            "residuals": {"b": bucket.accumulator.values().copy()},
            "companions": [{"b": bucket.accumulator.residual().copy()}],  # type: ignore[attr-defined]
        }
        for rank, bucket in enumerate(cluster.buckets)
    ]
    held = [redistributed(entries, rank, after)["companions"][0]["b"] for rank in range(after)]
    np.testing.assert_allclose(np.mean(held, 0), np.mean(cluster.residuals(), 0), rtol=0, atol=1e-6)


def test_companions_say_what_they_are() -> None:
    """A velocity is no residual: it must not be taken for what is held back."""
    for name, ours, theirs in [
        ("momentum", MomentumCorrection(), LowPass()),
        ("lowpass", LowPass(), MomentumCorrection()),
        (None, MomentumCorrection(), LowPass()),
    ]:
        saved = {"companions": [{}], "feedback": name}
        assert companions_fit(saved, ours) and not companions_fit(saved, theirs)
        assert not companions_fit(saved, ErrorFeedback())
    # with nothing beside the residual any feedback goes on
    assert companions_fit({"companions": [], "feedback": "none"}, ErrorFeedback())


@pytest.mark.parametrize("beta", [0.0, -0.1, 1.1, float("nan"), None, True])
def test_wrong_arguments_are_named(beta: Any) -> None:
    with pytest.raises(ArgumentError, match="beta="):
        LowPass(beta=beta)


@pytest.mark.parametrize("make", [HostAccumulator, functools.partial(TorchAccumulator, device="cpu")])
def test_a_fold_refuses_what_it_cannot_filter(make: Any) -> None:
    gradient = np.ones(4, np.float32) if make is HostAccumulator else torch.ones(4)
    for companions, arguments in [
        (0, {"low_pass": 0.5}),
        (1, {"low_pass": 0.0}),
        (1, {"low_pass": 1.5}),
        (1, {"low_pass": 0.5, "momentum": 0.5}),
    ]:
        accumulator = make(4, companions=companions)
        with pytest.raises(ArgumentError, match="low_pass"):
            accumulator.fold(gradient, **arguments)
        assert not accumulator.values().any() and gradient.all()
