"""Profiles: there and back, what differs, what cannot be applied."""

import dataclasses
import json

import numpy as np
import pytest

from horovod_sparse.errors import ArgumentError, ProfileMismatchError
from horovod_sparse.merging import PROFILE_VERSION, Fit, Profile, fit_time
from horovod_sparse.simulation import AlphaBeta
from horovod_sparse.sparsifiers import ExDyna, TopK
from horovod_sparse.topology import ClusterFacts
from support.merging_models import profile_of_hosts

PROFILE = Profile(
    size=4,
    framework="torch",
    controller="gloo",
    cycle_seconds=0.001,
    collectives={"allgather": Fit(1e-3, 1e-8, num_points=9), "allreduce": Fit(2e-3, 3e-8)},
    selection={"topk": Fit(1e-4, 1e-9, 1e-8), "exdyna": Fit(2e-4, 1e-9)},
    decoding={"topk": Fit(1e-5, 0.0, 2e-8)},
    backward_seconds={"z.weight": 0.25, "a.weight": 0.0},
    forward_seconds=0.125,
)


def test_what_differs_is_told() -> None:
    assert PROFILE.check(ClusterFacts(0, 4, "torch", "gloo")) == []
    told = PROFILE.check(ClusterFacts(0, 8, "tensorflow", "mpi", 0.002))
    words = ("4 ranks, here 8", "framework torch", "controller gloo", "a cycle time of 1 ms, here 2 ms")
    assert all(word in line for word, line in zip(words, told, strict=True))


def test_there_and_back(tmp_path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    assert list(Profile.load(path).backward_seconds) == ["z.weight", "a.weight"], "the model's order"
    assert Profile.load(path).digest() == PROFILE.digest()
    assert dataclasses.replace(PROFILE, cycle_seconds=0.002).digest() != PROFILE.digest()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no JSON object"),
        (json.dumps({"version": 99}), "version 99"),
        (json.dumps({"version": PROFILE_VERSION, "size": 2}), "damaged"),
        (PROFILE.to_json().replace('"size": 4', '"size": 0'), "damaged.*size"),
        (PROFILE.to_json().replace("0.25", "-0.25"), "damaged.*z.weight"),
    ],
)
def test_what_is_no_profile(text, match, tmp_path) -> None:
    with pytest.raises(ProfileMismatchError, match=match):
        Profile.from_json(text)
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ProfileMismatchError, match=r"broken\.json"):
        Profile.load(path)


def test_what_cannot_be_applied() -> None:
    without = dataclasses.replace(PROFILE, collectives={"allgather": Fit(1e-3, 1e-8)})
    with pytest.raises(ProfileMismatchError, match="exdyna needs allreduce"):
        without.cost(ExDyna(density=0.01))
    with pytest.raises(ArgumentError, match="collectives"):
        dataclasses.replace(PROFILE, collectives={"reduce": Fit(0.0, 0.0)})


def test_the_cost_of_top_k_by_hand() -> None:
    cost = PROFILE.cost(TopK(density=0.01))
    n = 1_000_000
    decode = 1e-5 + 2e-8 * 4 * 0.01 * n  # of 4 ranks, by the thread that selects
    assert cost.selection.seconds(n) == pytest.approx(1e-4 + 1e-9 * n + 1e-8 * 0.01 * n + decode)
    gather = 1e-3 + 1e-8 * (24 + 8 * 0.01 * n)
    assert cost.communication.seconds(n) == pytest.approx(gather, rel=1e-4)
    assert cost.dense.seconds(400) == pytest.approx(2e-3 + 3e-8 * 400)
    assert cost.dense_work.seconds(n) == 0.0
    worked = dataclasses.replace(PROFILE, selection={**PROFILE.selection, "dense": Fit(1e-5, 3e-9)})
    assert worked.cost(TopK()).dense_work.seconds(n) == pytest.approx(1e-5 + 3e-9 * n)


def test_a_rank_alone_needs_no_collective() -> None:
    alone = dataclasses.replace(PROFILE, size=1, collectives={})
    for sparsifier in (TopK(density=0.01), ExDyna(density=0.01)):
        cost = alone.cost(sparsifier)
        assert cost.communication.seconds(1e6) == cost.dense.seconds(1e6) == 0.0
        assert cost.selection.seconds(1e6) > 0.0


SIZES = 2.0 ** np.arange(6, 24)


def test_noise_and_outliers_do_not_move_it() -> None:
    random = np.random.default_rng(1)
    sizes = np.repeat(SIZES, 15)
    times = (3e-4 + 2e-9 * sizes) * np.exp(random.normal(0.0, 0.05, sizes.size))
    times[random.random(sizes.size) < 0.1] *= 20
    fit = fit_time(sizes, times)
    assert (fit.fixed_seconds, fit.seconds_per_unit) == pytest.approx((3e-4, 2e-9), rel=0.05)
    assert fit.num_points == SIZES.size
    # nor does a size that is wrong altogether
    times = 3e-4 + 2e-9 * SIZES
    times[5] *= 30
    fit = fit_time(SIZES, times)
    assert (fit.fixed_seconds, fit.seconds_per_unit) == pytest.approx((3e-4, 2e-9), rel=0.05)
    assert fit.largest_error > 0.9 and fit.median_error < 0.05


@pytest.mark.parametrize(
    ("sizes", "times", "match"),
    [
        ([1, 2], [1.0, 2.0], "2 distinct sizes"),
        ([1, 2, 3], [1.0, 2.0], "one time for every size"),
        ([1, 2, 3], [1.0, 0.0, 2.0], "positive, finite seconds"),
        ([1, 2, 3], [1.0, float("nan"), 2.0], "positive, finite seconds"),
    ],
)
def test_nonsense_is_refused(sizes, times, match) -> None:
    with pytest.raises(ArgumentError, match=match):
        fit_time(sizes, times, what="broadcast")


GIGABIT = AlphaBeta(50e-6, 8e-9)


def test_what_a_step_costs_is_the_sum_of_its_three_parts() -> None:
    n, density, inside = 1_000_000, 0.01, AlphaBeta(1e-5, 1e-10)
    profile = profile_of_hosts(GIGABIT, inside, 4, 2, Fit(1e-4, 1e-9))
    cost = profile.cost(TopK(density=density), levels="host")
    shard, selected = n / 2, density * n / 2
    scattered = inside.alpha_seconds + 4 * n * (1 / 2) * inside.beta_seconds
    # both ranks of a host receive three messages through one card
    between = 2 * GIGABIT.alpha_seconds + 2 * 3 * (24 + 8 * selected) * GIGABIT.beta_seconds
    gathered = inside.alpha_seconds + 8 * 4 * selected * inside.beta_seconds
    assert cost.communication.seconds(n) == pytest.approx(scattered + between + gathered, rel=1e-3)
    assert cost.selection.seconds(n) == pytest.approx(1e-4 + 1e-9 * shard)


def test_two_levels_are_written_and_have_to_fit() -> None:
    two = profile_of_hosts(GIGABIT, GIGABIT, 4, 2, Fit(1e-4, 1e-9))
    assert Profile.from_json(two.to_json()) == two
    with pytest.raises(ArgumentError, match="levels and per_host"):
        dataclasses.replace(two, per_host=3)
    four, sixteen = (
        two.cost(TopK(density=0.01), size, levels="host").communication.seconds(10**6) for size in (8, 32)
    )
    assert sixteen > four
