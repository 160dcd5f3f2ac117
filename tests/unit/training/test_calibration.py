"""Calibration with a clock that moves only when something is carried out, times of backward, and profiles."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.collectives import COLLECTIVES, AllGather, AllToAll, Broadcast, Exchange
from horovod_sparse.errors import ArgumentError, ProfileMismatchError
from horovod_sparse.feedback.bucket import num_bytes_sent
from horovod_sparse.merging import Profile
from horovod_sparse.planning.backward import BackwardTimes, mean_times
from horovod_sparse.planning.calibration import BucketMemory, Extent, calibration
from horovod_sparse.planning.model import Fit
from horovod_sparse.planning.profile import PROFILE_VERSION
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.sparsifiers import ALGORITHMS
from horovod_sparse.sparsifiers.dgc import DGC
from horovod_sparse.sparsifiers.exdyna import ExDyna
from horovod_sparse.sparsifiers.topk import TopK
from horovod_sparse.topology import ClusterFacts
from horovod_sparse.training.engine import carry_out
from support.sampling import rest_nightly

EXTENT = Extent((64, 4096, 65536, 1 << 20), (1 << 10, 1 << 13, 1 << 15), 9, budget_seconds=1e9)
ALPHA, BETA = 2e-3, 3e-9
KINDS = sorted({*COLLECTIVES.values()} - {"reducescatter"})  # which no sparsifier needs among all ranks


class FakeRank:
    def __init__(self, size: int) -> None:
        self.size, self.now, self.num_requests = size, 0.0, 0
        self.outliers = np.random.default_rng(0)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def execute(self, request):
        self.num_requests += 1
        slow = 50.0 if self.outliers.random() < 0.1 else 1.0  # one in ten, as on a busy machine
        self.now += slow * (ALPHA + BETA * num_bytes_sent(request, 0))
        if isinstance(request, AllGather):
            return np.tile(request.buffer, self.size)
        if isinstance(request, Exchange):
            return {source: next(iter(request.sends.values())) for source in request.sources}
        if isinstance(request, AllToAll):
            return list(request.buffers)
        return request.buffer * (1 if isinstance(request, Broadcast) else self.size)


class TimedMemory(BucketMemory):
    def __init__(self, fake: FakeRank) -> None:
        self.fake = fake

    def accumulator(self, info, recipe):
        fake = self.fake
        if recipe.sparsifier.name == "dense":
            return super().accumulator(info, recipe)

        class Timed(HostAccumulator):
            def fold(self, gradient, *rule):
                fake.now += 1e-4 + 2e-9 * gradient.size
                return super().fold(gradient, *rule)

        return Timed(info.num_elements, info.dtype, density=recipe.sparsifier.density)

    def apply(self, gradient, total, size):
        self.fake.now += 4e-8 * total.indices.size
        super().apply(gradient, total, size)


def measured(size, sparsifiers, **arguments):
    fake = FakeRank(size)
    coroutine = calibration(
        ClusterFacts(0, size, "torch", "gloo"),
        sparsifiers,
        **{"extent": EXTENT, "memory": TimedMemory(fake), **arguments},
        clock=fake.clock,
        sleep=fake.sleep,
    )
    return carry_out(coroutine, fake.execute), fake


def test_constants_are_recovered_though_some_repetitions_are_slow():
    profile, _ = measured(4, [TopK(density=0.01)], kinds=KINDS)
    assert sorted(profile.collectives) == KINDS
    for kind, fit in profile.collectives.items():
        assert fit.fixed_seconds == pytest.approx(ALPHA, rel=1e-3), kind
        assert fit.seconds_per_unit == pytest.approx(BETA, rel=1e-3), kind
    selection, decoding = profile.selection["topk"], profile.decoding["topk"]
    assert selection.fixed_seconds == pytest.approx(1e-4, rel=1e-3)
    assert selection.seconds_per_unit == pytest.approx(2e-9, rel=1e-3)
    # all ranks of the fake select alike: k elements from each of 4 ranks come back
    assert decoding.time(4 * 0.01).seconds(1 << 15) == pytest.approx(4e-8 * 4 * 328, rel=0.01)
    assert (profile.size, profile.framework, profile.controller) == (4, "torch", "gloo")


@pytest.mark.parametrize("name", rest_nightly(sorted(ALGORITHMS), ("exdyna", "gtopk", "oktopk", "topk")))
def test_every_sparsifier_can_be_calibrated_and_all_ranks_end_alike(name):
    sparsifier = ALGORITHMS[name](density=0.05 if ALGORITHMS[name].has_density else 1.0)
    extent = Extent((64, 256, 1024), (500, 2000, 4000), repetitions=1, budget_seconds=1e9)
    places = [ClusterFacts(rank, 4, "torch", "gloo", 1e-6) for rank in range(4)]
    profiles = run_lockstep([calibration(place, [sparsifier], extent=extent) for place in places])
    assert all(profile == profiles[0] for profile in profiles)
    cost = profiles[0].cost(sparsifier)
    assert cost.selection.seconds(1 << 20) > 0.0
    assert cost.communication.seconds(1 << 20) > 0.0


def test_when_the_budget_is_used_up_three_sizes_are_left():
    profile, fake = measured(
        2, [DGC()], extent=Extent((64, 256, 1024, 4096), (512, 1024, 2048, 4096), 1, 0.0)
    )
    assert {fit.num_points for fit in profile.collectives.values()} == {3}
    assert profile.selection["dgc"].num_points == 6  # at two densities each
    everything, slower = measured(2, [DGC()])
    assert slower.num_requests > fake.num_requests
    assert {fit.num_points for fit in everything.collectives.values()} == {4}


def test_ranks_agree_on_times_and_their_order_and_without_any_all_refuse():
    times = BackwardTimes({"b": 1.0, "a": 3.0}, 2.0)
    assert run_lockstep([mean_times(None), mean_times(times)]) == [times, times]
    refused = run_lockstep([mean_times(None), mean_times(None)], keep_errors=True)
    assert all(isinstance(error, ProfileMismatchError) for error in refused)
    # and of different orders all take one
    one = BackwardTimes({"c": 0.0, "b": 1.0, "a": 1.0}, 1.0)
    other = BackwardTimes({"c": 0.0, "a": 1.0, "b": 1.0}, 1.0)
    ends = run_lockstep([mean_times(times) for times in (one, other, one)])
    assert ends[0] == ends[1] == ends[2]
    assert all(list(end.backward_seconds) == ["c", "b", "a"] for end in ends)


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


def test_what_differs_from_the_measured_cluster_is_told() -> None:
    assert PROFILE.check(ClusterFacts(0, 4, "torch", "gloo")) == []
    told = PROFILE.check(ClusterFacts(0, 8, "tensorflow", "mpi", 0.002))
    words = ("4 ranks, here 8", "framework torch", "controller gloo", "a cycle time of 1 ms, here 2 ms")
    assert all(word in line for word, line in zip(words, told, strict=True))


def test_a_saved_profile_is_read_back(tmp_path, monkeypatch) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)

    def half(to: Path, text: str, **_: str) -> None:
        to.write_bytes(text[:99].encode())
        raise OSError("the disk is full")

    with monkeypatch.context() as full, pytest.raises(OSError):
        full.setattr(Path, "write_text", half)
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
def test_a_file_that_is_no_profile_is_refused(text, match, tmp_path) -> None:
    with pytest.raises(ProfileMismatchError, match=match):
        Profile.from_json(text)
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ProfileMismatchError, match=r"broken\.json"):
        Profile.load(path)


def test_a_profile_without_what_a_sparsifier_needs_is_refused() -> None:
    without = dataclasses.replace(PROFILE, collectives={"allgather": Fit(1e-3, 1e-8)})
    with pytest.raises(ProfileMismatchError, match="lacks allreduce: calibrate with exdyna"):
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
