"""SparDL against a plain account of the paper's algorithms, for every P and d, in every mode."""

from dataclasses import dataclass
from math import ceil, log2

import numpy as np
import pytest

from horovod_sparse.arrays import FoldReport
from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.sparsifiers.rounds.pairs import Mail
from horovod_sparse.sparsifiers.rounds.sparse_vectors import shared_out
from horovod_sparse.sparsifiers.spardl import SparDL
from horovod_sparse.wire import WireFormat
from support.gradients import dyadic, gaussian
from support.sampling import rows_by


def top(values: np.ndarray, k: int) -> np.ndarray:
    chosen = np.zeros(values.size, bool)
    chosen[np.argsort(-np.abs(values), kind="stable")[:k]] = True
    return chosen


@dataclass
class ReferenceStep:
    final: np.ndarray  # [n], the synchronized gradient
    chosen: np.ndarray  # bool [n], its indices
    residuals: dict[str, np.ndarray]  # mode -> [P, n]
    num_after: list[int]  # per position, elements of the union over teams before it is cut


def reference_step(
    accumulators: np.ndarray,
    teams: int,
    windows: list[tuple[int, int]],
    quotas: list[int],
    num_between: list[int] | None,
) -> ReferenceStep:
    """One step of Algorithm 1 on [P, n]; between teams B-SAG (h per position: `num_between`) or R-SAG."""
    size, n = accumulators.shape
    num_blocks = size // teams
    held = accumulators.copy()  # G, summed up in place
    sent = np.zeros((size, n), bool)  # what a rank has taken for sending or keeping
    left = np.zeros((size, n))  # xi: what remained where something was taken

    def sparsify(rank: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        start, stop = windows[block]
        chosen = np.zeros(n, bool)
        chosen[start:stop] = top(held[rank, start:stop], quotas[block])
        left[rank, start:stop] = np.where(chosen, 0.0, held[rank])[start:stop]
        sent[rank] |= chosen
        return np.where(chosen, held[rank], 0.0), chosen

    # Spar-Reduce-Scatter
    num_steps = int(np.ceil(np.log2(num_blocks))) if num_blocks > 1 else 0
    for i in range(1, num_steps + 1):
        distance, bag = 2 ** (num_steps - i), num_steps - i + 1
        messages = []
        for rank in range(size):
            team, w = divmod(rank, num_blocks)
            blocks = [
                (w + offset) % num_blocks for offset in range(2 ** (bag - 1), 2**bag) if offset < num_blocks
            ]
            target = team * num_blocks + (w + distance) % num_blocks
            messages.append((target, sum(sparsify(rank, block)[0] for block in blocks)))
        for target, message in messages:
            held[target] += message

    # every rank's own block, then the sum over teams
    own = [sparsify(rank, rank % num_blocks) for rank in range(size)]
    values, masks = [value for value, _ in own], [mask for _, mask in own]
    num_after = []
    for position in range(num_blocks):
        column = [team * num_blocks + position for team in range(teams)]
        quota = quotas[position]

        def reduce(group: list[int], givers: list[int], quota: int = quota) -> int:
            """Adds what the givers hold; all of the group keep the same, and share what they drop."""
            total = np.sum([values[rank] for rank in givers], axis=0)
            mask = np.any([masks[rank] for rank in givers], axis=0)
            keep = kept_of(total, mask, quota)
            for rank in group:
                left[rank] += np.where(mask & ~keep, total, 0.0) / len(group)
                masks[rank], values[rank] = keep, np.where(keep, total, 0.0)
            return int(mask.sum())

        if num_between is not None:
            for rank in column:
                reduce([rank], [rank], num_between[position])
            num_after.append(reduce(column, column))
        else:
            groups = [[rank] for rank in column]
            while len(groups) > 1:
                pairs = [(groups[i], groups[i + 1]) for i in range(0, len(groups), 2)]
                groups = [one + other for one, other in pairs]
                for one, other in pairs:
                    reduce(one + other, [one[0], other[0]])

    chosen = np.any(masks[:num_blocks], axis=0)
    residuals = {
        # lines 11 to 13: the copy, with xi where the final sum has an element
        "global": np.where(chosen, left, accumulators),
        "partial": np.where(sent & chosen, 0.0, accumulators),
        "local": np.where(sent, 0.0, accumulators),
    }
    return ReferenceStep(np.sum(values[:num_blocks], axis=0), chosen, residuals, num_after)


def kept_of(values: np.ndarray, mask: np.ndarray, k: int) -> np.ndarray:
    where = np.flatnonzero(mask)
    keep = np.zeros(values.size, bool)
    keep[where[top(values[where], k)]] = True
    return keep


_STEPS = 4


#: (P, d, way between teams): all sizes to 16, all divisors, both ways where there are two
VARIANTS = [
    (size, teams, way)
    for size in range(1, 17)
    for teams in range(1, size + 1)
    for way in ("bruck", "recursive")
    if size % teams == 0 and (way == "bruck" or teams & (teams - 1) == 0)
]


def num_between_of(cluster: SimulatedCluster, teams: int, between: str) -> list[int] | None:
    if between == "recursive":
        return None
    team_size = len(cluster.buckets) // teams
    if teams == 1:  # nothing goes between teams
        return [cluster.buckets[0].info.num_elements] * team_size
    return [int(bucket.last.facts["num_between_teams"]) for bucket in cluster.buckets[:team_size]]


@rows_by("variant,mode", VARIANTS, ["global", "partial", "local"])
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


def test_teams_and_messages_that_cannot_be_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"teams=4 is not allowed: give a divisor of 6 ranks"):
        SimulatedCluster(recipe("spardl", teams=4), 100, 6)
    with pytest.raises(ArgumentError, match="3 teams are not a power of two"):
        SimulatedCluster(recipe("spardl", teams=3, between="recursive"), 100, 6)
    with pytest.raises(MessageError, match="is too short"):
        Mail(FoldReport(), BucketInfo("b", 9, 0, 3), WireFormat()).read(np.zeros(3, np.int32), [0, 1])


@rows_by("num_parts,dtype", [1, 2, 3, 5, 7, 8, 14, 16], ["float32", "float64"])
def test_shares_add_up_exactly(num_parts: int, dtype: str) -> None:
    generator = np.random.default_rng(num_parts)
    values = (generator.standard_normal(5000) * 10.0 ** generator.integers(-20, 20, 5000)).astype(dtype)
    parts = [shared_out(values.copy(), num_parts, part) for part in range(num_parts)]
    assert (np.sum(parts, axis=0, dtype=np.longdouble) == values).all()
    for part in parts:
        np.testing.assert_allclose(part, values / num_parts, rtol=0.01)


#: words of a message, of a rank's note in it, and of a message within a message
_HEADER, _NOTE, _FRAME = 6, 4, 1


@pytest.mark.parametrize("size", [2, 3, 6, 8, 13, 16])
def test_rounds_and_words_are_those_of_table_1(size: int) -> None:
    """Words of elements (an index and a value each) that every rank receives; n = 40 P, k = 4 P."""
    k, within = 4 * size, _HEADER + _NOTE + _FRAME

    def log(number: int) -> int:
        return ceil(log2(number))

    def headers(teams: int, between: int) -> int:
        inside = size // teams
        return log(inside) * _HEADER + between + (inside - 1) * (_HEADER + _NOTE * teams + _FRAME)

    one = 4 * (size - 1) / size * k
    rows: list[tuple[dict[str, object], int, float, float, int]] = [
        ({"name": "topk"}, log(size), *[2.0 * (size - 1) * k] * 2, (size - 1) * _HEADER),
        ({"gather": "allgather"}, 2 * log(size), one, one, (log(size) + size - 1) * _HEADER),
    ]
    for d in (number for number in range(1, size + 1) if size % number == 0):
        rounds, sent = 2 * log(size // d) + log(d), 2 * (size - d) / size * k
        if d & (d - 1) == 0:
            words = 2 * ((2 * size - 2 * d) / size + d / size * log2(d)) * k
            between = sum(_HEADER + _NOTE * 2**stage for stage in range(log(d)))
            rows.append(({"teams": d, "between": "recursive"}, rounds, words, words, headers(d, between)))
        # Eq. 10 as printed leaves out what Spar-Reduce-Scatter sends
        least = sent + 2 * (d**2 + size - 2 * d) / (size * d) * k
        most = 2 * (d**2 + 2 * size - 3 * d) / size * k
        rows.append(({"teams": d, "between": "bruck"}, rounds, least, most, headers(d, (d - 1) * within)))
    for given, rounds, least, most, beside in rows:
        made = recipe(
            **{"name": "spardl", "gather": "bruck", **given} if "name" not in given else given, density=0.1
        )
        cluster = SimulatedCluster(made, 40 * size, size)
        cluster.synchronize([*gaussian(np.random.default_rng(size), (size, 40 * size)).astype(np.float32)])
        totals = [cluster.recorder.total(rank) for rank in range(size)]
        assert {total.rounds for total in totals} == {rounds}, given
        words = np.array([total.bytes_received / 4 - beside for total in totals])
        assert (words >= least - 1e-9).all() and (words <= most + 1e-9).all(), given
