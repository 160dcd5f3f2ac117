"""Profiles: there and back, what differs, what cannot be applied."""

from __future__ import annotations

import dataclasses
import json

import pytest

from horovod_sparse.cost import Fit, Profile, check_same_profile, communication_of, omgs_cost
from horovod_sparse.cost.times import AffineTime
from horovod_sparse.errors import ArgumentError, ProfileMismatchError, UnknownNameError
from horovod_sparse.sparsifiers import ALGORITHMS, ExDyna, TopK

PROFILE = Profile(
    size=4,
    framework="torch",
    controller="gloo",
    cycle_seconds=0.001,
    collectives={
        "allgather": Fit(1e-3, 1e-8, num_points=9, notes=("told",)),
        "allreduce": Fit(2e-3, 3e-8),
    },
    selection={"topk": Fit(1e-4, 1e-9, 1e-8), "exdyna": Fit(2e-4, 1e-9)},
    decoding={"topk": Fit(1e-5, 0.0, 2e-8)},
    backward_seconds={"z.weight": 0.25, "a.weight": 0.0},
    forward_seconds=0.125,
)


def test_there_and_back(tmp_path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    assert list(Profile.load(path).backward_seconds) == ["z.weight", "a.weight"], "the model's order"
    assert Profile.load(path).digest() == PROFILE.digest()
    assert dataclasses.replace(PROFILE, cycle_seconds=0.002).digest() != PROFILE.digest()


def test_no_host_name_is_written() -> None:
    assert not [key for key in json.loads(PROFILE.to_json()) if "host" in key]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no JSON object"),
        ("[1]", "no JSON object"),
        ("{}", "no JSON object"),
        (json.dumps({"version": 99}), "version 99"),
        (json.dumps({"version": 1, "size": 2}), "damaged"),
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


def test_differences_are_told() -> None:
    assert PROFILE.check(size=4, framework="torch", controller="gloo", cycle_seconds=0.001) == []
    told = PROFILE.check(size=8, framework="tensorflow", controller="mpi", cycle_seconds=0.0001)
    assert [
        word in sentence for word, sentence in zip(("8", "tensorflow", "mpi", "0.1 ms"), told, strict=True)
    ]
    assert all(sentence.startswith("the profile was measured with") for sentence in told)


def test_what_cannot_be_applied() -> None:
    with pytest.raises(ProfileMismatchError, match="1 rank"):
        dataclasses.replace(PROFILE, size=1).check(size=2, framework="torch")
    with pytest.raises(ProfileMismatchError, match="no collectives"):
        dataclasses.replace(PROFILE, collectives={}).check(size=4, framework="torch")
    with pytest.raises(ProfileMismatchError, match=r"no backward time for b\.weight"):
        PROFILE.backward_of(["z.weight", "b.weight"])
    with pytest.raises(ProfileMismatchError, match="takes no time"):
        PROFILE.backward_of(["a.weight"])
    assert PROFILE.backward_of(["a.weight", "z.weight"]) == (0.0, 0.25)
    with pytest.raises(ProfileMismatchError, match="no selection time for micro"):
        PROFILE.cost(ALGORITHMS["micro"](density=0.01))
    without = dataclasses.replace(PROFILE, collectives={"allgather": Fit(1e-3, 1e-8)})
    with pytest.raises(ProfileMismatchError, match="exdyna needs allreduce"):
        without.cost(ExDyna(density=0.01))
    with pytest.raises(ArgumentError, match="collectives"):
        dataclasses.replace(PROFILE, collectives={"reduce": Fit(0.0, 0.0)})


def test_ranks_with_different_profiles() -> None:
    check_same_profile(["x", "x"])
    with pytest.raises(ProfileMismatchError, match="ranks 1, 3 loaded another profile than rank 0"):
        check_same_profile(["x", "y", "x", "y"])


def test_the_cost_of_top_k_by_hand() -> None:
    cost = PROFILE.cost(TopK(density=0.01))
    n = 1_000_000
    decode = 1e-5 + 2e-8 * 4 * 0.01 * n  # of 4 ranks, by the thread that selects
    assert cost.selection.seconds(n) == pytest.approx(1e-4 + 1e-9 * n + 1e-8 * 0.01 * n + decode)
    gather = 1e-3 + 1e-8 * (16 + 8 * 0.01 * n)
    assert cost.communication.seconds(n) == pytest.approx(gather, rel=1e-4)
    assert cost.dense.seconds(400) == pytest.approx(2e-3 + 3e-8 * 400)
    assert cost.dense_work.seconds(n) == 0.0
    worked = dataclasses.replace(PROFILE, selection={**PROFILE.selection, "dense": Fit(1e-5, 3e-9)})
    assert worked.cost(TopK()).dense_work.seconds(n) == pytest.approx(1e-5 + 3e-9 * n)


def test_exclusive_windows_share_the_selection_out() -> None:
    cost = PROFILE.cost(ExDyna(density=0.01))
    n = 1_000_000
    gather, reduce = 1e-3 + 1e-8 * (16 + 4 * 0.01 * n / 4), 2e-3 + 3e-8 * 4 * 0.01 * n
    assert cost.communication.seconds(n) == pytest.approx(gather + reduce, rel=1e-3)


def test_a_kind_that_was_not_measured() -> None:
    with pytest.raises(UnknownNameError, match="allreduce"):
        communication_of(ExDyna(density=0.01), 4, {"allgather": AffineTime()})


def test_the_papers_constants() -> None:
    cost = omgs_cost(16, 0.001)
    # 2 (11 ms + 17 ns * 16 ranks * 4 bytes * 1000 elements)
    assert cost.communication.seconds(1_000_000) == pytest.approx(2 * (11e-3 + 1.7e-8 * 64_000))
    assert cost.selection.seconds(2**20) == pytest.approx(2.18896957e-10 * 2**20 * 20)
    with pytest.raises(ArgumentError, match="size=32"):
        omgs_cost(32, 0.001)


def test_a_rank_alone_needs_no_collective() -> None:
    """As with `merging="optimal"` on one rank, where a profile is measured that has none."""
    alone = dataclasses.replace(PROFILE, size=1, collectives={})
    for sparsifier in (TopK(density=0.01), ExDyna(density=0.01)):
        cost = alone.cost(sparsifier)
        assert cost.communication.seconds(1e6) == cost.dense.seconds(1e6) == 0.0
        assert cost.selection.seconds(1e6) > 0.0
