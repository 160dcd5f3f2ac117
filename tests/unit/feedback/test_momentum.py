"""Momentum correction, clipping, and steps normalized by a second moment, against their equations."""

from typing import Any

import numpy as np
import pytest

from horovod_sparse.arrays import FoldRule, GradientParts, HostAccumulator
from horovod_sparse.errors import NonFiniteGradientError
from horovod_sparse.feedback import (
    AdamFeedback,
    ErrorFeedback,
    MomentumCorrection,
    NoFeedback,
    Progress,
    Recipe,
    RMSpropFeedback,
    parse_recipe,
    recipe,
)
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers.topk import TopK
from horovod_sparse.topology import Topology
from horovod_sparse.training.encoding import from_plain, to_plain
from horovod_sparse.training.parts import progress_of, resumed
from horovod_sparse.training.state import redistributed
from support.cases import REPRESENTATIVES, Case, case_id
from support.gradients import DTYPES, as_gradient, dyadic, gaussian, wide
from support.laws import Scenario, run
from support.sampling import rows_by

_P, _N, _K = 3, 40, 4


def by_the_equations(
    gradients: np.ndarray, momentum: float, nesterov: bool, masking: bool
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Sums of every step, residuals and velocities at the end: Lin et al. 2018, Eqs. (4), (5) and (9)."""
    residual, velocity = np.zeros((_P, _N)), np.zeros((_P, _N))
    sums = []
    for step in gradients:
        velocity = momentum * velocity + step
        residual = residual + (step + momentum * velocity if nesterov else velocity)
        total = np.zeros(_N)
        for rank in range(_P):
            sent = np.argsort(-np.abs(residual[rank]), kind="stable")[:_K]
            total[sent] += residual[rank, sent]
            residual[rank, sent] = 0
            if masking:
                velocity[rank, sent] = 0
        sums.append(total)
    return sums, residual, velocity


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_equations(nesterov: bool, masking: bool) -> None:
    gradients = dyadic(np.random.default_rng(1), (8, _P, _N))
    feedback = MomentumCorrection(momentum=0.5, nesterov=nesterov, masking=masking)
    made = Recipe(TopK(density=_K / _N), feedback)
    sums, residuals, velocities = by_the_equations(gradients, 0.5, nesterov, masking)
    history = run(made, Scenario(_P, _N, num_steps=8), gradients)
    for number, expected in enumerate(sums):
        np.testing.assert_array_equal(history.dense(number), expected)  # few bits: exact
    for rank, bucket in enumerate(history.cluster.buckets):
        np.testing.assert_array_equal(bucket.accumulator.values(), residuals[rank])
        np.testing.assert_array_equal(bucket.accumulator.companions[0], velocities[rank])


@pytest.mark.parametrize("text", ["topk:density=1.0", "topk:density=0.1,schedule=linear(steps=3,start=1.0)"])
def test_nothing_is_masked_where_all_is_sent(text: str) -> None:
    """It would be SGD without momentum: at density 1, and while a schedule is there."""
    made = parse_recipe(f"{text},feedback=momentum(momentum=0.5)")
    cluster, gradients = SimulatedCluster(made, _N, 2), dyadic(np.random.default_rng(4), (1, 2, _N))
    for step in gradients:
        np.testing.assert_array_equal(cluster.step(list(step.astype(np.float32))), step.sum(0))
    for rank, bucket in enumerate(cluster.buckets):
        np.testing.assert_array_equal(bucket.accumulator.companions[0], gradients[0, rank])


def norm(values: Any) -> float:
    return float(np.linalg.norm(wide(values) if isinstance(values, np.ndarray) else values))


@rows_by("dtype,feedback", DTYPES, [ErrorFeedback, NoFeedback, MomentumCorrection])
def test_clipping_is_local_and_by_the_root_of_the_ranks(dtype: str, feedback: Any) -> None:
    # Four ranks: what one rank adds has a norm of at most 1 / sqrt(4).
    made = Recipe(TopK(density=0.01), feedback(clip_norm=1.0))
    cluster = SimulatedCluster(made, 1000, 4, dtype)
    values = np.random.default_rng(4).standard_normal((4, 1000))
    values[3] *= 1e-3  # this rank's is small enough
    given = [as_gradient(row, dtype) for row in values]
    exact = [wide(row) for row in given]
    sum_ = cluster.synchronize(given)[0]
    folded = np.array(cluster.residuals(), np.float64)
    for rank, count in enumerate(sum_.counts):
        mine = slice(int(sum_.counts[:rank].sum()), int(sum_.counts[:rank].sum() + count))
        folded[rank, sum_.indices[mine]] += sum_.values[mine]
    tolerance = {"float32": 1e-6, "float64": 1e-12, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    for rank in range(3):
        np.testing.assert_allclose(np.linalg.norm(folded[rank]), 0.5, rtol=tolerance)
        np.testing.assert_allclose(
            folded[rank], 0.5 * exact[rank] / norm(exact[rank]), rtol=tolerance, atol=1e-6
        )
    np.testing.assert_array_equal(folded[3], exact[3])


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


def test_what_is_applied_with_momentum_follows_the_learning_rate() -> None:
    made = Recipe(TopK(density=0.25), MomentumCorrection(momentum=0.5, scale_residual=True))
    cluster = SimulatedCluster(made, 4, 1)
    cluster.synchronize([np.array([8, 1, 1, 1], np.float32)], 0.5)
    # held: residual (0, 1, 1, 1), velocity (0, 1, 1, 1); the rate halves: residual 2, plus velocity 0.5
    cluster.synchronize([np.array([9, 0, 0, 0], np.float32)], 0.25)
    assert cluster.residuals()[0].tolist() == [0, 2.5, 2.5, 2.5]


_PAIRWISE: list[dict[str, Any]] = [
    *({"name": "gtopk"}, {"name": "gtopk", "values": "float16"}, {"name": "oktopk"}, {"name": "topk_dsa"}),
    *({"name": "spardl"}, {"name": "spardl", "teams": "auto", "latency_seconds": 1.0}),
    {"name": "spardl", "residuals": "partial"},
]


@rows_by("arguments,masking,size", _PAIRWISE, [True, False], [2, 3, 6, 1], each=3)
def test_velocity_is_masked_where_the_own_value_left_for_good(
    arguments: dict[str, Any], masking: bool, size: int
) -> None:
    """Not where it came back, and not where another rank's value only passed through."""
    n = 60
    feedback = MomentumCorrection(momentum=0.5, masking=masking)
    cluster = SimulatedCluster(recipe(**arguments, density=0.1, feedback=feedback), n, size)
    generator, velocities = np.random.default_rng(size), np.zeros((size, n), np.float32)
    num_kept = 0
    for _ in range(5):
        gradients = dyadic(generator, (size, n)).astype(np.float32)
        residuals = np.array(cluster.residuals())
        velocities = np.float32(0.5) * velocities + gradients
        accumulators = residuals + velocities
        sum_ = cluster.synchronize(list(gradients.copy()))[0]
        applied = np.zeros(n, bool)
        applied[sum_.indices] = True
        for rank, bucket in enumerate(cluster.buckets):
            # what a rank holds at an applied index is not what it had: its own value has left it, or
            # others' have been added; only the first masks, so look where nothing else can have come
            velocity = bucket.accumulator.companions[0]
            changed = velocity != velocities[rank]
            if not masking:
                assert not changed.any()
                continue
            assert not velocity[changed].any(), "a velocity is kept or cleared"
            assert not changed[~applied].any(), "nothing was applied there"
            left = applied & (cluster.residuals()[rank] == 0) & (accumulators[rank] != 0)
            assert not velocity[left].any(), "a value has left, and its velocity with it"
            num_kept += int((velocity != 0).sum())
        velocities = np.array([bucket.accumulator.companions[0] for bucket in cluster.buckets])
    assert num_kept or not masking


_STEPS = 8
_RATES = [0.0, 0.05, 0.1, 0.1, 0.07, 0.003, 1e-5, 0.1]


def normalized(
    gradients: np.ndarray, beta2: float, eps: float = 1e-8, corrected: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    moment, steps = np.zeros(gradients.shape[1:]), []
    for number, gradient in enumerate(gradients, 1):
        moment = beta2 * moment + (1 - beta2) * gradient**2
        held = 1 - beta2**number if corrected else 1.0
        steps.append(gradient / (np.sqrt(moment / held) + eps))
    return np.array(steps), moment


def drawn(*shape: int) -> np.ndarray:
    generator = np.random.default_rng(shape)
    return gaussian(generator, shape) * np.exp(2 * generator.standard_normal(shape[-1]))


@pytest.mark.parametrize(("dtype", "kind"), [("float32", AdamFeedback), ("float64", RMSpropFeedback)])
def test_the_equations_of_moments(dtype: str, kind: type) -> None:
    gradients = drawn(_STEPS, _P, _N)
    steps, moments = normalized(gradients, 0.9, 1e-3, kind is AdamFeedback)
    made = Recipe(TopK(density=_K / _N), kind(beta2=0.9, eps=1e-3, whole_batch=False))
    history = run(made, Scenario(_P, _N, dtype, num_steps=_STEPS), gradients, rates=_RATES)
    residual = np.zeros((_P, _N))
    for number, rate in enumerate(_RATES):
        residual += rate * steps[number]
        total = np.zeros(_N)
        for rank in range(_P):
            sent = history.steps[number].sums[0].indices[rank * _K : (rank + 1) * _K]
            least = np.sort(np.abs(residual[rank]))[-_K]
            assert (np.abs(residual[rank, sent]) >= least * (1 - 1e-5)).all()
            np.add.at(total, sent, residual[rank, sent])
            residual[rank, sent] = 0
        np.testing.assert_allclose(history.dense(number), total, rtol=1e-5, atol=1e-7)
    for rank, bucket in enumerate(history.cluster.buckets):
        np.testing.assert_allclose(bucket.accumulator.values(), residual[rank], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(bucket.accumulator.companions[0], moments[rank], rtol=1e-5)


@pytest.mark.parametrize("case", [one for one in REPRESENTATIVES if not one.quantizes], ids=case_id)
@pytest.mark.parametrize("hosts", [0, 2])
def test_nothing_is_lost_on_the_way_by_any_sparsifier(case: Case, hosts: int) -> None:
    gradients, size = drawn(6, 4, 500), 4
    made = Recipe(case.recipe.sparsifier, AdamFeedback(beta2=0.9, whole_batch=False))
    history = run(made, Scenario(size, 500, num_steps=6, hosts=hosts), gradients, rates=[0.1] * 6)
    folded = gradients.reshape(6, hosts, size // hosts, 500).sum(2) if hosts else gradients
    wanted = 0.1 * normalized(folded, 0.9)[0].sum((0, 1))
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
    for step, gradient in zip(normalized(gradients, 0.9)[0], gradients, strict=True):
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
    assert resumed(known, None, count + 1).leans == (0.0, 0.0)
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


def test_clipping_comes_before_the_moment() -> None:
    gradient = drawn(1, _N)[0].astype(np.float32)
    cluster = SimulatedCluster(recipe("topk", density=0.1, feedback=AdamFeedback(0.9, clip_norm=1.0)), _N, 4)
    cluster.step([gradient.copy() for _ in range(4)], 0.1)
    clipped = gradient / np.linalg.norm(gradient) / 2  # by the root of the ranks
    for bucket in cluster.buckets:
        np.testing.assert_allclose(bucket.accumulator.companions[0], 0.1 * clipped**2, rtol=1e-5)


def test_a_step_that_is_given_up_leaves_no_trace() -> None:
    good, bad, last = drawn(3, _N).astype(np.float32)
    clusters = [SimulatedCluster(recipe("topk", density=0.1, feedback="adam"), _N, 1) for _ in range(2)]
    for cluster in clusters:
        cluster.step([GradientParts([good])], 0.1)
    (bucket,) = clusters[0].buckets
    clusters[0].synchronize([GradientParts([bad])], 0.1)
    bucket.abandon(drop=True)
    for cluster in clusters:
        cluster.step([GradientParts([last])], 0.1)
    for mine, theirs in zip(*(cluster.buckets for cluster in clusters), strict=True):
        assert mine.progress == theirs.progress and mine.progress.age == 2
        assert np.abs(mine.accumulator.companions[0] - theirs.accumulator.companions[0]).max() < 1e-6
        np.testing.assert_allclose(mine.accumulator.values(), theirs.accumulator.values(), atol=1e-5)


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
    assert levels.progress == Progress(5, 0.1, 0.1, since=5, summed=2) and levels.state.step == 5
    assert levels.feedback.moment_factor(before.age, 0) == 0.0
    assert from_plain(Progress(), to_plain(levels.progress)) == levels.progress


def test_a_moment_is_as_old_as_the_steps_that_it_is_made_of() -> None:
    """Zeros that passed for a moment of many steps would make steps of 1 / sqrt(1 - beta2) times the rate."""
    old, young = Progress(1000, 0.1), Progress(1000, 0.1, since=990)
    worker = resumed(Progress(), to_plain(old), 1000)
    assert (worker.step, worker.learning_rate, worker.age) == (1000, 0.1, 0)
    assert resumed(Progress(7), to_plain(old), 1000).age == 7
    assert progress_of(["a", "b"], {"a": old, "b": young}).age == 10
    assert progress_of(["c"], {"a": old}).age == 0
