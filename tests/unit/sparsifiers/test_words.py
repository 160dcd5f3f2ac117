"""SparDL's and Ok-Topk's words on the wire, as their papers count them, and messages that are refused."""

from math import ceil, log2

import numpy as np
import pytest

from horovod_sparse.arrays import FoldReport
from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import Recorder, SimulatedCluster
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.sparsifiers.oktopk import reported_places
from horovod_sparse.sparsifiers.rounds.pairs import Mail
from horovod_sparse.sparsifiers.rounds.sparse_vectors import keeps_discards, split_exactly
from horovod_sparse.wire import WireFormat
from support.gradients import gaussian
from support.sampling import rows_by


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
    parts = [split_exactly(values.copy(), num_parts, part) for part in range(num_parts)]
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
        ({"teams": 1}, 2 * log(size), one, one, (log(size) + size - 1) * _HEADER),
    ]
    for d in (number for number in range(2, size + 1) if size % number == 0):
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
        made = recipe(**{"name": "spardl", **given}, density=0.1)
        cluster = SimulatedCluster(made, 40 * size, size)
        cluster.synchronize([*gaussian(np.random.default_rng(size), (size, 40 * size)).astype(np.float32)])
        totals = [cluster.recorder.total(rank) for rank in range(size)]
        assert {total.rounds for total in totals} == {rounds}, given
        words = np.array([total.bytes_received / 4 - beside for total in totals])
        assert (words >= least - 1e-9).all() and (words <= most + 1e-9).all(), given


@rows_by("size,region_steps", [1, 2, 3, 8], [1, 64])
def test_k_pass_and_6k_travel_in_every_step(size: int, region_steps: int) -> None:
    """From the first step on, while residuals grow: kept thresholds let many times as many pass.

    Without the padding that lets lengths repeat.
    """
    n, k = 60_000, 600
    made = recipe("oktopk", density=k / n, region_steps=region_steps)
    cluster = SimulatedCluster(made, n, size)
    generator = np.random.default_rng(size)
    for step in range(12):
        gradients = generator.standard_normal((size, n), np.float32)
        # one region, if it stays, has nearly all
        gradients[:, : n // 8] *= 1.5 if region_steps == 1 else 8.0
        accumulators = np.array(cluster.residuals()) + gradients
        cluster.recorder = Recorder()
        sums = cluster.synchronize(list(gradients))
        assert sums[0].counts.tolist() == [k] * size
        assert k <= sums[0].indices.size <= 1.1 * k
        # words that a rank receives: headers, the notes of the thresholds, bounds; the rest is of elements
        notes = (size - 1) * (2 + reported_places(k).size + 3 * 5 + size)
        received = [cluster.recorder.total(rank).bytes_received / 4 - notes for rank in range(size)]
        assert np.mean(received) <= 6 * k * 1.1
        # those that come back are the largest sums, but for the tenth to which they are told
        chosen = np.abs(accumulators) >= np.sort(np.abs(accumulators))[:, -k][:, None]
        total = np.abs((accumulators * chosen).sum(0))
        if not keeps_discards(step):
            left = np.delete(total, sums[0].indices)
            assert (left > 1.1 * np.sort(total)[-k]).sum() <= 0.12 * k
