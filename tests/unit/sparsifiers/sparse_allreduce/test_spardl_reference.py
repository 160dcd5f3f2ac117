"""SparDL against a plain account of the paper's algorithms, for every P and d, in every mode."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import SparDL
from support.gradients import dyadic, layered
from support.spardl_reference import reference_step

_STEPS = 4


def divisors(size: int) -> list[int]:
    return [teams for teams in range(1, size + 1) if size % teams == 0]


def variants() -> list[tuple[int, int, str]]:
    """(P, d, way between teams): all sizes to 16, all divisors, both ways where there are two."""
    found = []
    for size in range(1, 17):
        for teams in divisors(size):
            found.append((size, teams, "bruck"))
            if teams & (teams - 1) == 0:
                found.append((size, teams, "recursive"))
    return found


def num_between_of(cluster: SimulatedCluster, teams: int, between: str) -> list[int] | None:
    if between == "recursive":
        return None
    team_size = len(cluster.buckets) // teams
    if teams == 1:  # nothing goes between teams
        return [cluster.buckets[0].info.num_elements] * team_size
    return [int(bucket.last.facts["num_between_teams"]) for bucket in cluster.buckets[:team_size]]


@pytest.mark.parametrize(("size", "teams", "between"), variants())
@pytest.mark.parametrize("mode", ["global", "partial", "local"])
def test_steps_are_those_of_the_paper(size: int, teams: int, between: str, mode: str) -> None:
    n, density = 97 + 3 * size, 0.13
    generator = np.random.default_rng([size, teams])
    cluster = SimulatedCluster(
        recipe("spardl", density=density, teams=teams, between=between, residuals=mode), n, size
    )
    k = max(1, round(density * n))
    for step in range(_STEPS):
        gradients = dyadic(generator, (size, n)).astype(np.float32)
        accumulators = np.array(cluster.residuals(), np.float64) + gradients
        sums = cluster.synchronize([gradient.copy() for gradient in gradients])

        layout = SparDL(density=density, teams=teams).layout(cluster.buckets[0].info, k, step)
        blocks = range(layout.team_size)
        expected = reference_step(
            accumulators,
            teams,
            [layout.window(block) for block in blocks],
            [layout.quota(block) for block in blocks],
            num_between_of(cluster, teams, between),
        )
        assert sums[0].indices.tolist() == np.flatnonzero(expected.chosen).tolist()
        # shares of a third, fifth, ... are rounded; everything else is exact
        np.testing.assert_allclose(cluster.dense(sums[0]), expected.final, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(cluster.residuals(), expected.residuals[mode], rtol=1e-6, atol=1e-6)
        for other in sums[1:]:
            assert other.indices.tobytes() == sums[0].indices.tobytes()
            assert other.values.tobytes() == sums[0].values.tobytes()
        if between == "bruck" and teams > 1:
            after = [int(bucket.last.facts["num_after_teams"]) for bucket in cluster.buckets]
            assert after == expected.num_after * teams


@pytest.mark.parametrize(("size", "teams", "between"), variants())
@pytest.mark.parametrize("gather", ["bruck", "allgather"])
def test_nothing_is_lost_with_global_residuals(size: int, teams: int, between: str, gather: str) -> None:
    n = 400
    generator = np.random.default_rng([size, teams, 7])
    cluster = SimulatedCluster(
        recipe("spardl", density=0.05, teams=teams, between=between, gather=gather), n, size
    )
    wanted, applied, magnitude = np.zeros(n), np.zeros(n), np.zeros(n)
    for _ in range(6):
        gradients = layered(generator, (size, n)).astype(np.float32)
        wanted += gradients.sum(0, dtype=np.float64)
        magnitude += np.abs(gradients).sum(0, dtype=np.float64)
        sum_ = cluster.synchronize([gradient.copy() for gradient in gradients])[0]
        assert np.all(np.diff(sum_.indices) > 0)
        applied += cluster.dense(sum_).astype(np.float64)
        held = np.sum(cluster.residuals(), axis=0, dtype=np.float64)
        allowed = 6 * size * np.finfo(np.float32).eps * magnitude
        assert (np.abs(applied + held - wanted) <= allowed).all()


@pytest.mark.parametrize(("size", "teams"), [(6, 1), (8, 2), (12, 3), (16, 4)])
def test_what_partial_and_local_lose(size: int, teams: int) -> None:
    """The missing mass of one step is what the mode drops: it is in the global residual, and not here."""
    n, density = 240, 0.1
    gradients = dyadic(np.random.default_rng(size), (size, n)).astype(np.float32)
    held, sums = {}, {}
    for mode in ("global", "partial", "local"):
        cluster = SimulatedCluster(recipe("spardl", density=density, teams=teams, residuals=mode), n, size)
        sums[mode] = cluster.synchronize([gradient.copy() for gradient in gradients])[0]
        held[mode] = np.sum(cluster.residuals(), axis=0, dtype=np.float64)
    wanted = gradients.sum(0, dtype=np.float64)
    final = np.zeros(n, bool)
    final[sums["global"].indices] = True
    applied = cluster.dense(sums["global"])
    missing = {mode: wanted - applied - held[mode] for mode in held}
    assert not np.abs(missing["global"]).max() > 1e-5
    # in-procedure discards are at indices of the final sum, end-procedure ones elsewhere
    assert not missing["partial"][~final].any() and np.abs(missing["partial"][final]).max() > 0.1
    np.testing.assert_allclose(missing["local"][final], missing["partial"][final], atol=1e-6)
    assert np.abs(missing["local"][~final]).max() > 0.1


def test_teams_that_do_not_divide_the_ranks_are_refused_on_every_rank() -> None:
    with pytest.raises(ArgumentError, match=r"teams=4 is not allowed: give a divisor of 6 ranks"):
        SimulatedCluster(recipe("spardl", teams=4), 100, 6)
    with pytest.raises(ArgumentError, match="3 teams are not a power of two"):
        SimulatedCluster(recipe("spardl", teams=3, between="recursive"), 100, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"teams": 0}, "teams=0 is not allowed"),
        ({"teams": 1.5}, r"teams=1\.5 is not allowed"),
        (
            {"residuals": "globl"},
            "unknown residuals of spardl 'globl': the known ones are global, local, partial",
        ),
        ({"between": "ring"}, "unknown between of spardl 'ring'"),
        ({"gather": "none"}, "unknown gather of spardl 'none'"),
        ({"latency_seconds": -1.0}, r"latency_seconds=-1\.0 is not allowed"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SparDL(**arguments)  # type: ignore[arg-type]


def test_rounds_of_auto_are_known_for_a_bucket() -> None:
    described = SparDL(teams="auto")
    with pytest.raises(ArgumentError, match="a bucket decides it"):
        described.rounds(6)
    cluster = SimulatedCluster(recipe("spardl", teams="auto"), 1000, 6)
    assert len(cluster.buckets[0].recipe.sparsifier.rounds(6)) == 3  # six teams: B-SAG alone


def test_every_block_has_its_turn() -> None:
    """k = 1 among eight blocks: no element waits for ever."""
    cluster = SimulatedCluster(recipe("spardl", density=0.001), 800, 8)
    seen: set[int] = set()
    for _ in range(8):
        gradients = [np.ones(800, np.float32) for _ in range(8)]
        sum_ = cluster.synchronize(gradients)[0]
        assert sum_.indices.size == 1
        seen.add(int(sum_.indices[0]) // 100)
    assert seen == set(range(8))


@pytest.mark.parametrize("values", ["float16", "int8"])
@pytest.mark.parametrize(("size", "teams"), [(6, 1), (8, 4), (6, 3)])
@pytest.mark.parametrize("gather", ["bruck", "allgather"])
def test_rounding_for_the_wire_goes_to_a_residual(size: int, teams: int, gather: str, values: str) -> None:
    n = 300
    cluster = SimulatedCluster(
        recipe("spardl", density=0.1, teams=teams, gather=gather, values=values, indices="block16"), n, size
    )
    generator, wanted, applied = np.random.default_rng(3), np.zeros(n), np.zeros(n)
    for _ in range(4):
        gradients = generator.standard_normal((size, n)).astype(np.float32)
        wanted += gradients.sum(0, dtype=np.float64)
        sums = cluster.synchronize(list(gradients))
        assert len({sum_.values.tobytes() for sum_ in sums}) == 1
        applied += cluster.dense(sums[0])
        held = np.sum(cluster.residuals(), axis=0, dtype=np.float64)
        np.testing.assert_allclose(applied + held, wanted, atol=2e-5)
