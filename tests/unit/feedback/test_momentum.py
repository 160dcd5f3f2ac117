"""Clipping, and steps normalized by a second moment, by any sparsifier and through what happens to ranks."""

from typing import Any

import numpy as np
import pytest

from horovod_sparse.arrays import FoldRule, HostAccumulator
from horovod_sparse.errors import NonFiniteGradientError
from horovod_sparse.feedback import AdamFeedback, ErrorFeedback, Progress, Recipe, recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers.topk import TopK
from horovod_sparse.topology import Topology
from horovod_sparse.training.encoding import from_plain, to_plain
from horovod_sparse.training.parts import progress_after_agreement, progress_of
from horovod_sparse.training.state import redistributed
from support.cases import REPRESENTATIVES, Case, case_id
from support.gradients import DTYPES, as_gradient, gaussian, wide
from support.laws import Scenario, run
from support.sampling import rows_by

_N = 40


def norm(values: Any) -> float:
    return float(np.linalg.norm(wide(values) if isinstance(values, np.ndarray) else values))


@rows_by("dtype,value", DTYPES, [np.nan, np.inf])
def test_what_is_not_finite_is_named_though_clipped(dtype: str, value: float) -> None:
    cluster = SimulatedCluster(Recipe(TopK(density=0.1), ErrorFeedback(clip_norm=1.0)), 100, 2, dtype)
    rows = np.random.default_rng(5).standard_normal((2, 100))
    rows[1, 30] = value
    given = [as_gradient(row, dtype) for row in rows]
    exact = wide(given[1])
    errors = cluster.synchronize(given, keep_errors=True)
    assert all(isinstance(error, NonFiniteGradientError) and 1 in error.where for error in errors)
    held = cluster.residuals()[1]
    # what was finite has been clipped by its own norm, and kept
    finite = np.where(np.isfinite(exact), exact, 0)
    np.testing.assert_allclose(held, finite / norm(finite) / np.sqrt(2), rtol=1e-2, atol=1e-3)
    assert held[30] == 0 and held.any()


@pytest.mark.parametrize("scale", [1e-35, 1e35, 1e200])
def test_norms_whose_squares_are_no_numbers(scale: float) -> None:
    dtype = np.float64 if scale > 1e38 else np.float32
    accumulator = HostAccumulator(100, dtype)
    gradient = (np.random.default_rng(6).standard_normal(100) * scale).astype(dtype)
    expected = gradient / float(np.linalg.norm(gradient.astype(np.float64) / scale)) / scale * (scale / 8)
    accumulator.fold(gradient, FoldRule(clip_norm=scale / 8))
    np.testing.assert_allclose(accumulator.values() / scale, expected / scale, rtol=1e-5)


def normalized(gradients: np.ndarray, beta2: float, eps: float = 1e-8) -> np.ndarray:
    """Adam's steps for a rate of 1."""
    moment, steps = np.zeros(gradients.shape[1:]), []
    for number, gradient in enumerate(gradients, 1):
        moment = beta2 * moment + (1 - beta2) * gradient**2
        steps.append(gradient / (np.sqrt(moment / (1 - beta2**number)) + eps))
    return np.array(steps)


def drawn(*shape: int) -> np.ndarray:
    generator = np.random.default_rng(shape)
    return gaussian(generator, shape) * np.exp(2 * generator.standard_normal(shape[-1]))


@pytest.mark.parametrize("case", [one for one in REPRESENTATIVES if not one.quantizes], ids=case_id)
@pytest.mark.parametrize("hosts", [0, 2])
def test_nothing_is_lost_on_the_way_by_any_sparsifier(case: Case, hosts: int) -> None:
    gradients, size = drawn(6, 4, 500), 4
    made = Recipe(case.recipe.sparsifier, AdamFeedback(beta2=0.9, whole_batch=False))
    history = run(made, Scenario(size, 500, num_steps=6, hosts=hosts), gradients, rates=[0.1] * 6)
    folded = gradients.reshape(6, hosts, size // hosts, 500).sum(2) if hosts else gradients
    wanted = 0.1 * normalized(folded, 0.9).sum((0, 1))
    got = sum(history.dense(number) for number in range(6)) + np.sum(history.cluster.residuals(), axis=0)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", [0.0, 0.25, 1.0])
def test_steps_are_as_long_as_of_the_whole_batch(shared: float) -> None:
    """``s^2 = mean |g_i|^2 / |mean g_i|^2``, as all ranks learn alike; a step given up tells nothing."""
    size, n, k, count = 4, 2000, 100, 160
    noise = np.random.default_rng(7).standard_normal((count, size, n))
    gradients = np.sqrt(shared) * np.sign(noise[0, 0]) + np.sqrt(1 - shared) * noise
    made = recipe("topk", density=k / n, feedback="adam(beta2=0.9)")
    cluster, residual, longer = SimulatedCluster(made, n, size, "float64"), np.zeros((size, n)), []
    for step, gradient in zip(normalized(gradients, 0.9), gradients, strict=True):
        (mean, own), *others = {bucket.progress.leans for bucket in cluster.buckets}
        assert not others
        longer.append(min(2.0, np.sqrt(own / mean)) if mean else 1.0)
        residual += 0.1 * longer[-1] * step
        for rank in range(size):
            residual[rank, np.argsort(-np.abs(residual[rank]), kind="stable")[:k]] = 0
        cluster.step(list(gradient.copy()), 0.1)
    np.testing.assert_allclose(cluster.residuals(), residual, rtol=1e-6, atol=1e-9)
    assert longer[:2] == [1.0, pytest.approx(1.0, abs=0.02)]
    assert np.mean(longer[100:]) == pytest.approx((shared + (1 - shared) / size) ** -0.5, rel=0.08)
    before = cluster.buckets[0].progress.leans
    cluster.step([1000 * gradients[0, 0], *gradients[0, 1:].copy()], 0.1)
    (bucket, *_), known = cluster.buckets, cluster.buckets[0].progress
    assert known.leans[1] < 1.3 * before[1], "one bad batch does not rule"
    assert from_plain(Progress(), to_plain(known)) == known
    assert progress_after_agreement(known, count + 1).leans == (0.0, 0.0)
    for value in (1.0, np.nan):
        gradients[0, 3, 5] = value
        cluster.synchronize(list(gradients[0].copy()), 0.1, keep_errors=True)
        bucket.abandon()
        assert bucket.progress.leans == known.leans


@pytest.mark.parametrize("case", REPRESENTATIVES, ids=case_id)
@pytest.mark.parametrize("hosts", [0, 2])
def test_messages_of_every_sparsifier_tell_how_alike_gradients_are(case: Case, hosts: int) -> None:
    found = []
    for sparsifier in (case.recipe.sparsifier, TopK(density=0.1)):
        cluster = Scenario(4, 500, hosts=hosts).cluster(Recipe(sparsifier, AdamFeedback()))
        for step in (drawn(20, 1, 500) + drawn(20, 4, 500)).astype(np.float32):
            cluster.step(list(step), 0.1)
        found.append(sorted({(bucket.info.name, *bucket.progress.leans) for bucket in cluster.buckets}))
    assert len(found[0]) == (2 if hosts else 1), "ranks have the same"
    for (name, mean, own), (other, *leans) in zip(*found, strict=True):
        assert name == other and (mean, own) == pytest.approx(leans, rel=1e-6)
        assert 0.5 < mean / own < 0.99


def test_moments_are_averaged_at_another_number_of_ranks() -> None:
    entries: list[dict[str, Any]] = [
        {"rank": rank, "size": 4, "feedback": "adam"}
        | {"residuals": {"w": np.full(2, 1.0)}, "companions": [{"w": np.full(2, 1.0 + rank)}]}
        for rank in range(4)
    ]
    fewer, more = redistributed(entries, 1, 3), redistributed(entries, 5, 8)
    assert fewer["companions"][0]["w"].tolist() == [2.0, 2.0]  # of rank 1 alone
    assert redistributed(entries, 0, 3)["companions"][0]["w"].tolist() == [2.5, 2.5]  # of ranks 0 and 3
    assert more["companions"][0]["w"].tolist() == [2.0, 2.0]


def test_where_other_ranks_share_hosts_moments_start_anew() -> None:
    made = recipe("topk", density=0.1, feedback="adam")
    flat = SimulatedCluster(made, _N, 4)
    for gradients in drawn(5, 4, _N).astype(np.float32):
        flat.step(list(gradients), 0.1)
    before = flat.buckets[0].progress
    assert before.age == 5 and all(before.leans) and from_plain(Progress(), to_plain(before)) == before
    levels = SimulatedCluster(made, _N, 4, topology=Topology.regular(2, 2)).buckets[0]
    levels.restart(before)
    assert levels.progress == Progress(5, since=5, summed=2) and levels.state.step == 5
    assert levels.feedback.moment_factor(before.age, 0) == 0.0
    assert from_plain(Progress(), to_plain(levels.progress)) == levels.progress


def test_a_moment_is_as_old_as_the_steps_that_it_is_made_of() -> None:
    """Zeros that passed for a moment of many steps would make steps of 1 / sqrt(1 - beta2) times the rate."""
    old, young = Progress(1000), Progress(1000, since=990)
    worker = progress_after_agreement(Progress(), 1000)
    assert (worker.step, worker.age) == (1000, 0)
    assert progress_after_agreement(Progress(7), 1000).age == 7
    assert progress_of(["a", "b"], {"a": old, "b": young}).age == 10
    assert progress_of(["c"], {"a": old}).age == 0
