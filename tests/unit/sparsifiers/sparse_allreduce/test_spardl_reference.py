"""SparDL against a plain account of the paper's algorithms, for every P and d, in every mode."""

import numpy as np
import pytest

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import SparDL
from support.gradients import dyadic
from support.sampling import rows_by
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


@rows_by("variant,mode", variants(), ["global", "partial", "local"])
def test_steps_are_those_of_the_paper(variant: tuple[int, int, str], mode: str) -> None:
    size, teams, between = variant
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


def test_teams_that_do_not_divide_the_ranks_are_refused_on_every_rank() -> None:
    with pytest.raises(ArgumentError, match=r"teams=4 is not allowed: give a divisor of 6 ranks"):
        SimulatedCluster(recipe("spardl", teams=4), 100, 6)
    with pytest.raises(ArgumentError, match="3 teams are not a power of two"):
        SimulatedCluster(recipe("spardl", teams=3, between="recursive"), 100, 6)


@rows_by("places,gather,values", [(6, 1), (8, 4), (6, 3)], ["bruck", "allgather"], ["float16", "int8"])
def test_rounding_for_the_wire_goes_to_a_residual(places: tuple[int, int], gather: str, values: str) -> None:
    (size, teams), n = places, 300
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
