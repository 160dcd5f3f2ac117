"""Two levels in the cost model: what they cost, when they are taken, and what profiles hold of them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from horovod_sparse.cost import (
    AlphaBeta,
    Fit,
    Profile,
    assumed_profile,
    choose_levels,
    profile_at,
    with_levels,
)
from horovod_sparse.errors import ArgumentError, ProfileMismatchError
from horovod_sparse.sparsifiers import ExDyna, TopK

GIGABIT = AlphaBeta(50e-6, 8e-9)


def _profile(**changed):
    return assumed_profile(GIGABIT, 8, per_host=2, **changed)


def test_what_a_step_costs_is_the_sum_of_its_three_parts() -> None:
    n, density, inside = 1_000_000, 0.01, AlphaBeta(1e-5, 1e-10)
    profile = _profile(host_network=inside, selection=Fit(1e-4, 1e-9))
    cost = profile.cost(TopK(density=density), levels="host")
    shard, selected = n / 2, density * n / 2
    scattered = inside.alpha_seconds + 4 * n * (1 / 2) * inside.beta_seconds
    # both ranks of a host receive three messages through one card
    between = 2 * GIGABIT.alpha_seconds + 2 * 3 * (16 + 8 * selected) * GIGABIT.beta_seconds
    gathered = inside.alpha_seconds + 8 * 4 * selected * inside.beta_seconds
    assert cost.communication.seconds(n) == pytest.approx(scattered + between + gathered, rel=1e-3)
    assert cost.selection.seconds(n) == pytest.approx(1e-4 + 1e-9 * shard)


def test_what_leaves_a_host_is_what_its_hosts_would_send() -> None:
    """Of top-k, (N - 1) / (P - 1); a sparsifier that counts globally sends as much either way."""
    times = [AlphaBeta(0.0, 1e-8), AlphaBeta(0.0, 0.0)]  # nothing but bytes between hosts
    for sparsifier, share in ((TopK(density=0.01), 3 / 7), (ExDyna(density=0.01), 6 / 7)):
        profile = assumed_profile(times[0], 8, per_host=2, host_network=times[1])
        host, flat = (profile.cost(sparsifier, levels=levels) for levels in ("host", "flat"))
        told = host.communication.seconds(10**8) / flat.communication.seconds(10**8)
        assert told == pytest.approx(share, rel=0.01)


def test_the_faster_one_is_chosen() -> None:
    few, many = (choose_levels(TopK(density=0.001), 25_600_000, hosts, 8) for hosts in (1, 64))
    assert many.levels == "host" and many.host_seconds < many.flat_seconds
    assert "64 hosts of 8 ranks" in many.reason and "by formulas" in many.reason
    assert few.levels == "flat" and few.host_seconds > few.flat_seconds, "within one host it is dense"
    slow_inside = with_levels(_profile(), 2)
    slow = {kind: Fit(1.0, 1e-6) for kind in slow_inside.levels["host"]}
    slow_inside = dataclasses.replace(slow_inside, levels={**slow_inside.levels, "host": slow})
    slow_inside = dataclasses.replace(slow_inside, framework="torch")
    told = choose_levels(TopK(density=0.01), 25_600_000, 4, 2, profile=slow_inside)
    assert told.levels == "flat" and "by the profile" in told.reason


def test_a_profile_with_one_level_is_enough() -> None:
    flat = dataclasses.replace(assumed_profile(GIGABIT, 8), framework="torch")
    choice = choose_levels(TopK(density=0.01), 25_600_000, 4, 2, profile=flat)
    assert choice.levels == "host" and "by formulas within hosts" in choice.reason
    with pytest.raises(ProfileMismatchError, match="one level"):
        flat.cost(TopK(), levels="host")


def test_a_sparsifier_that_cannot_be_among_hosts_is_used_flat() -> None:
    from horovod_sparse.sparsifiers import SparDL

    choice = choose_levels(SparDL(teams=4), 10**6, 2, 4)
    assert choice.levels == "flat", choice.reason


def test_there_and_back_and_as_ever_with_one() -> None:
    two = _profile()
    assert Profile.from_json(two.to_json()) == two and two.digest() != assumed_profile(GIGABIT, 8).digest()
    assert not {"levels", "per_host"} & set(json.loads(assumed_profile(GIGABIT, 8).to_json()))
    with pytest.raises(ArgumentError, match="levels and per_host"):
        dataclasses.replace(two, per_host=3)
    with pytest.raises(ArgumentError, match="per_host"):
        assumed_profile(GIGABIT, 8, per_host=3)


def test_more_hosts_of_as_many_ranks() -> None:
    sixteen = profile_at(_profile(), 32)
    assert (sixteen.num_hosts, sixteen.per_host) == (16, 2)
    expected = assumed_profile(GIGABIT, 32, per_host=2).levels
    for kind in ("allgather", "allreduce"):
        told, wanted = (levels["across"][kind] for levels in (sixteen.levels, expected))
        assert told.seconds_per_unit == pytest.approx(wanted.seconds_per_unit)
        assert told.fixed_seconds == pytest.approx(wanted.fixed_seconds)
    assert sixteen.levels["host"] == expected["host"]
    assert not profile_at(_profile(), 9).levels


def test_what_quantizers_decode_grows_with_ranks() -> None:
    fits = {"qsgd": Fit(1e-3, 4e-9), "topk": Fit(1e-3, 4e-9)}
    found = profile_at(dataclasses.replace(_profile(), decoding=fits), 32).decoding
    assert found["topk"] == fits["topk"]
    assert found["qsgd"].seconds_per_unit == pytest.approx(4e-9 * 32 / _profile().size)
