"""Small cases worked by hand, and the figures of the SparDL paper."""

from dataclasses import replace

import numpy as np
import pytest

from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.collectives import Exchange
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster, run_lockstep
from horovod_sparse.sparsifiers import BucketInfo, GTopK, SparDL
from horovod_sparse.sparsifiers.rounds.pairs import bruck_all_gather
from horovod_sparse.sparsifiers.spardl.teams import adjusted, fresh_state, num_between_teams
from horovod_sparse.wire import WireFormat, unpack_sum
from support.sampling import rest_nightly


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def held(cluster: SimulatedCluster) -> list[list[float]]:
    return [residual.tolist() for residual in cluster.residuals()]


def test_figure_5_messages_of_six_workers() -> None:
    # Example 2, worker 1 of 6. Blocks of ten elements, one kept of each: k = 6.
    #   step 1, distance 4: sends blocks {5, 6} to worker 5, receives two blocks from worker 3
    #     (1 - 4 around a circle of 6; the paper's text says 2);
    #   step 2, distance 2: sends {3, 4} to worker 3, receives from worker 5;
    #   step 3, distance 1: sends {2} to worker 2, receives from worker 6.
    expected = [(5, 3, [5, 6]), (3, 5, [3, 4]), (2, 6, [2])]
    info = BucketInfo("figure 5", 60, rank=0, size=6)
    accumulator = HostAccumulator(60)
    accumulator.fold(np.arange(1, 61, dtype=np.float32))
    sparsifier = SparDL(density=0.1, gather="bruck").resolved(info)
    coroutine = sparsifier.synchronize(accumulator, sparsifier.init(info), info)
    request, nothing = next(coroutine), np.array([4, 0, 0, 0], np.int32)  # a message without elements
    for target, source, blocks in expected:
        assert isinstance(request, Exchange)
        (peer, words), *others = request.sends.items()
        assert (peer + 1, [rank + 1 for rank in request.sources], others) == (target, [source], [])
        message = unpack_sum(words, 1, WireFormat(), 60, np.float32)
        # values ascend, so the last element of every block is its largest
        assert message.indices.tolist() == [10 * block - 1 for block in blocks]
        assert message.values.tolist() == [10.0 * block for block in blocks]
        request = coroutine.send({source - 1: nothing})


@pytest.mark.parametrize("size", rest_nightly(range(1, 17), (1, 2, 3, 6, 8, 13)))
def test_figure_3_bruck_gathers_any_number(size: int) -> None:
    messages = [np.full(rank % 4, rank, np.int32) for rank in range(size)]
    results = run_lockstep([bruck_all_gather(messages[me], range(size), me) for me in range(size)])
    for result in results:
        assert [words.tolist() for words in result] == [message.tolist() for message in messages]


def test_spardl_on_two_ranks() -> None:
    # n = 4, density 0.5: k = 2; blocks [0, 2) and [2, 4), one element kept of each.
    cluster = SimulatedCluster(recipe("spardl", density=0.5), num_elements=4, size=2)
    # Rank 0 has (5, 1 | 2, 3) and sends block 1: 3 at 3. Rank 1 has (1, 4 | 6, -1) and sends block 0: 4 at 1.
    # Rank 0's block is then (5, 1 + 4): a tie, the lower index stays: 5 at 0.
    # Rank 1's block is (6, -1 + 3): 6 at 2.
    sum_ = cluster.synchronize([floats(5, 1, 2, 3), floats(1, 4, 6, -1)])[0]
    assert (sum_.indices.tolist(), sum_.values.tolist()) == ([0, 2], [5.0, 6.0])
    # Nothing came through at 1 and 3: both ranks keep there what they had (end-procedure). At 0 rank 1,
    # and at 2 rank 0, keep what they never sent (local).
    assert held(cluster) == [[0, 1, 2, 3], [1, 4, 0, -1]]


@pytest.mark.parametrize(
    ("mode", "residuals"),
    [
        # index 0 is in the sum: what stages dropped there stays where it was dropped; index 1 is not in
        # the sum: rank 1 has its 5 again
        ("global", [[2, 0], [2, 5], [0, 0], [0, 0]]),
        ("partial", [[0, 0], [0, 5], [0, 0], [0, 0]]),  # the 4 is lost
        ("local", [[0, 0], [0, 0], [0, 0], [0, 0]]),  # the 5, too
    ],
)
def test_figure_6_end_and_in_procedure(mode: str, residuals: list[list[float]]) -> None:
    # Four teams of one, n = 2, k = 1. Ranks send 4 at 0, 5 at 1, 6 at 0, 1 at 0.
    # R-SAG, distance 1: ranks 0 and 1 add up (4, 5), keep the 5, drop the 4: two each.
    #                    ranks 2 and 3 add up (7, 0), keep the 7.
    #        distance 2: all have (7, 5), keep the 7, drop the 5: a quarter each. The sum: 7 at 0.
    cluster = SimulatedCluster(recipe("spardl", density=0.5, teams=4, residuals=mode), num_elements=2, size=4)
    sum_ = cluster.synchronize([floats(4, 0), floats(0, 5), floats(6, 0), floats(1, 0)])[0]
    assert (sum_.indices.tolist(), sum_.values.tolist()) == ([0], [7.0])
    assert held(cluster) == residuals


def test_b_sag_cuts_before_and_after() -> None:
    # Two teams of one, n = 4, k = 2: L = 2, h starts at L / d = 1.
    cluster = SimulatedCluster(
        recipe("spardl", density=0.5, teams=2, between="bruck"), num_elements=4, size=2
    )
    # Rank 0 selects (4, 3, ., .), sends 4 at 0. Rank 1 selects (., ., 2, 5), sends 5 at 3. Both are kept.
    first = cluster.synchronize([floats(4, 3, 0, 1), floats(1, 0, 2, 5)])[0]
    assert (first.indices.tolist(), first.values.tolist()) == ([0, 3], [4.0, 5.0])
    # What did not come through stays: 3 at 1 (not among the first h), and what was never selected.
    assert held(cluster) == [[0, 3, 0, 1], [1, 0, 2, 0]]


def test_algorithm_2_by_hand() -> None:
    # d = 5, L = 1000: h begins at 200, the stride at 0.01 * 1000 * 4 / 5 = 8.
    state, log = fresh_state(5), []
    # N = 900 three times (right direction), 1100 (wrong), 1100 twice (right), 1000 (not above L: wrong)
    for num_after in (900, 900, 900, 1100, 1100, 1100, 1000):
        state = adjusted(state, num_after, 1000, 5)
        log.append((round(1000 * state.stride, 6), round(1000 * state.share, 6), state.confirmed))
    assert log == [
        (8, 208, True),
        (16, 224, False),
        (16, 240, True),
        (-8, 232, False),
        (-8, 224, True),
        (-16, 208, False),
        (8, 216, False),
    ]


def test_gtopk_on_three_ranks() -> None:
    # n = 4, k = 1. Ranks select 3 at 0, 2 at 1, 2.5 at 1.
    cluster = SimulatedCluster(recipe("gtopk", density=0.25), num_elements=4, size=3)
    # Up, distance 1: rank 1 sends 2 at 1 to rank 0, which has (3, 2), keeps the 3, drops the 2.
    # Up, distance 2: rank 2 sends 2.5 at 1 to rank 0, which has (3, 2.5), keeps the 3, drops the 2.5.
    # (Both at 1 would have made 4.5: the price of a tree. They are not lost, and meet at rank 0.)
    gradients = [floats(3, 0, 1, 0), floats(0, 2, 0, 1), floats(0, 2.5, 0, 0)]
    sums = cluster.synchronize(gradients)
    assert [(s.indices.tolist(), s.values.tolist()) for s in sums] == [([0], [3.0])] * 3
    assert held(cluster) == [[0, 4.5, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    # Next step, no gradients: rank 0 sends the 4.5 first.
    assert cluster.step([np.zeros(4, np.float32) for _ in range(3)]).tolist() == [0, 4.5, 0, 0]


@pytest.mark.parametrize("size", rest_nightly(range(1, 17), (1, 2, 3, 6, 8, 13)))
def test_gtopk_goes_up_and_down_any_tree(size: int) -> None:
    """One element that all ranks share: its sum must hold everyone exactly once."""
    cluster = SimulatedCluster(recipe("gtopk", density=0.01), num_elements=100, size=size)
    gradients = [np.zeros(100, np.float32) for _ in range(size)]
    for rank, gradient in enumerate(gradients):
        gradient[37] = 2.0**rank
    sums = cluster.synchronize(gradients)
    assert all(sum_.values.tolist() == [2.0**size - 1] for sum_ in sums)
    assert len(GTopK().rounds(size)) == 2 * int(np.ceil(np.log2(size)))


def test_algorithm_2_recovers_from_a_stride_of_nothing() -> None:
    state = replace(fresh_state(4), stride=0.0)
    for _ in range(3):
        state = adjusted(state, num_after=10, quota=100, teams=4)
    assert num_between_teams(state, 100, 4) > 25
    # however long it oscillates, it can still move by one element
    for step in range(200):
        state = adjusted(state, num_after=10 if step % 2 else 1000, quota=100, teams=4)
    assert abs(state.stride) * 100 >= 0.75
    # and it stays within [L / d, L]
    for _ in range(200):
        state = adjusted(state, num_after=1000, quota=100, teams=4)
    assert num_between_teams(state, 100, 4) == 25
    for _ in range(200):
        state = adjusted(state, num_after=0, quota=100, teams=4)
    assert num_between_teams(state, 100, 4) == 100
