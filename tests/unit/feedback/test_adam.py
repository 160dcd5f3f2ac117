"""Steps normalized by a second moment before they wait, against the equations written out in float64."""

from typing import Any

import numpy as np
import pytest

from horovod_sparse.arrays import GradientParts, HostAccumulator
from horovod_sparse.feedback import AdamFeedback, Progress, Recipe, RMSpropFeedback, recipe, resumed
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import TopK
from horovod_sparse.topology import Topology
from horovod_sparse.training.parts import progress_of
from horovod_sparse.training.state import redistributed
from support.cases import REPRESENTATIVES, Case, case_id
from support.gradients import gaussian
from support.history import Scenario, run
from support.reference import ReferenceAccumulator

_P, _N, _K, _STEPS = 3, 40, 4, 8
_RATES = [0.0, 0.05, 0.1, 0.1, 0.07, 0.003, 1e-5, 0.1]


def normalized(
    gradients: np.ndarray, beta2: float, eps: float = 1e-8, corrected: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Every rank's own step of rate 1, [steps, P, n]; and the moments at the end."""
    moment, steps = np.zeros(gradients.shape[1:]), []
    for number, gradient in enumerate(gradients, 1):
        moment = beta2 * moment + (1 - beta2) * gradient**2
        held = 1 - beta2**number if corrected else 1.0
        steps.append(gradient / (np.sqrt(moment / held) + eps))
    return np.array(steps), moment


def drawn(*shape: int) -> np.ndarray:
    """Of sizes that differ by element, as gradients do."""
    generator = np.random.default_rng(shape)
    return gaussian(generator, shape) * np.exp(2 * generator.standard_normal(shape[-1]))


@pytest.mark.parametrize("memory", [HostAccumulator, ReferenceAccumulator])
@pytest.mark.parametrize(("dtype", "kind"), [("float32", AdamFeedback), ("float64", RMSpropFeedback)])
def test_the_equations(memory: type, dtype: str, kind: type) -> None:
    gradients = drawn(_STEPS, _P, _N)
    steps, moments = normalized(gradients, 0.9, 1e-3, kind is AdamFeedback)
    made = Recipe(TopK(density=_K / _N), kind(beta2=0.9, eps=1e-3))
    history = run(made, Scenario(_P, _N, dtype, num_steps=_STEPS), gradients, memory, rates=_RATES)
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
    made = Recipe(case.recipe.sparsifier, AdamFeedback(beta2=0.9))
    history = run(made, Scenario(size, 500, num_steps=6, hosts=hosts), gradients, rates=[0.1] * 6)
    folded = gradients.reshape(6, hosts, size // hosts, 500).sum(2) if hosts else gradients
    wanted = 0.1 * normalized(folded, 0.9)[0].sum((0, 1))
    got = sum(history.dense(number) for number in range(6)) + np.sum(history.cluster.residuals(), axis=0)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("feedback", "made"),
    [
        ("adam", ("AdamW", {"betas": (0.0, 0.95), "weight_decay": 0.0})),
        ("rmsprop", ("RMSprop", {"alpha": 0.95})),
    ],
)
def test_dense_is_the_optimizer_without_a_first_moment(feedback: str, made: Any) -> None:
    torch = pytest.importorskip("torch")
    gradients = drawn(_STEPS, 1, _N)
    weights = torch.nn.Parameter(torch.zeros(_N, dtype=torch.float64))
    optimizer = getattr(torch.optim, made[0])([weights], lr=1.0, **made[1])
    cluster, ours = SimulatedCluster(recipe("topk", density=1.0, feedback=feedback), _N, 1, "float64"), 0.0
    for bucket in cluster.buckets:
        bucket.feedback = bucket.feedback.with_settings({"beta2": 0.95})
    for rate, (gradient,) in zip(_RATES, gradients, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        weights.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        ours = ours - cluster.step([gradient.copy()], rate)
    np.testing.assert_allclose(ours, weights.detach().numpy(), rtol=1e-9, atol=1e-12)


def test_clipping_comes_before_the_moment() -> None:
    gradient = drawn(1, _N)[0].astype(np.float32)
    cluster = SimulatedCluster(recipe("topk", density=0.1, feedback=AdamFeedback(0.9, clip_norm=1.0)), _N, 4)
    cluster.step([gradient.copy() for _ in range(4)], 0.1)
    clipped = gradient / np.linalg.norm(gradient) / 2  # by the root of the ranks
    for bucket in cluster.buckets:
        np.testing.assert_allclose(bucket.accumulator.companions[0], 0.1 * clipped**2, rtol=1e-5)


def test_a_step_that_is_given_up_leaves_no_trace() -> None:
    """Its gradient is dropped: the moment is what it was, and the next step counts as this one did."""
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
    """Not added up, as residuals are: each is an estimate of the same."""
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
    """Of a host's sum they are another number; and they start with their bias, not with steps without end."""
    made = recipe("topk", density=0.1, feedback="adam")
    flat = SimulatedCluster(made, _N, 4)
    for gradients in drawn(5, 4, _N).astype(np.float32):
        flat.step(list(gradients), 0.1)
    before = flat.buckets[0].progress
    assert before == Progress(5, 0.1, 0.1) and Progress.from_plain(before.to_plain(), 5) == before
    levels = SimulatedCluster(made, _N, 4, topology=Topology.regular(2, 2)).buckets[0]
    levels.restart(before)
    assert (levels.progress.age, levels.progress.summed, levels.state.step) == (0, 2, 5)
    assert levels.feedback.moved(before.age, 0) == 0.0
    assert Progress.from_plain(levels.progress.to_plain(), 5) == levels.progress


def test_a_bucket_of_another_age_takes_the_estimate_over() -> None:
    feedback = AdamFeedback(beta2=0.9)
    moment = 0.3 * (1 - 0.9**3)
    assert moment * feedback.moved(3, 10) / (1 - 0.9**10) == pytest.approx(0.3)
    assert feedback.moved(0, 10) == 0.0 and RMSpropFeedback().moved(3, 10) == 1.0


def test_a_moment_is_as_old_as_the_steps_that_it_is_made_of() -> None:
    """Zeros that passed for a moment of many steps would make steps of 1 / sqrt(1 - beta2) times the rate."""
    old, young = Progress(1000, 0.1), Progress(1000, 0.1, since=990)
    worker = resumed(Progress(), old.to_plain(), 1000)
    assert (worker.step, worker.learning_rate, worker.age) == (1000, 0.1, 0)
    assert resumed(Progress(7), old.to_plain(), 1000).age == 7
    assert progress_of(["a", "b"], {"a": old, "b": young}).age == 10
    assert progress_of(["c"], {"a": old}).age == 0
