"""SparDL against a plain account of the paper's algorithms, for every P and d, in every mode."""

import numpy as np
import pytest

from horovod_sparse.arrays import FoldReport
from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import BucketInfo, SparDL
from horovod_sparse.sparsifiers.rounds.pairs import Mail
from horovod_sparse.sparsifiers.rounds.sparse_vectors import shared_out
from horovod_sparse.wire import WireFormat
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


@rows_by("num_parts,dtype", [1, 2, 3, 5, 7, 8, 14, 16], ["float32", "float64"])
def test_shares_add_up_exactly(num_parts: int, dtype: str) -> None:
    generator = np.random.default_rng(num_parts)
    values = (generator.standard_normal(5000) * 10.0 ** generator.integers(-20, 20, 5000)).astype(dtype)
    parts = [shared_out(values.copy(), num_parts, part) for part in range(num_parts)]
    assert (np.sum(parts, axis=0, dtype=np.longdouble) == values).all()
    for part in parts:
        np.testing.assert_allclose(part, values / num_parts, rtol=0.01)


def test_a_message_too_short_for_its_notes_is_refused() -> None:
    with pytest.raises(MessageError, match="notes of 2 ranks"):
        Mail(FoldReport(), BucketInfo("b", 9, 0, 3), WireFormat()).read(np.zeros(3, np.int32), [0, 1])
