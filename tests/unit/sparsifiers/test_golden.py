"""Small cases worked by hand: the arithmetic stands beside the numbers."""

from dataclasses import replace

import numpy as np
import pytest

from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.collectives import Exchange
from horovod_sparse.errors import StateMismatchError
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import BucketInfo, SparseSum
from horovod_sparse.sparsifiers.spardl import SparDL
from horovod_sparse.sparsifiers.spardl.teams import adjusted, fresh_state, num_between_teams
from horovod_sparse.thresholds import Sketch
from horovod_sparse.wire import WireFormat, unpack_sum


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def pairs(sum_: SparseSum) -> list[tuple[int, float]]:
    return [(int(index), float(value)) for index, value in zip(sum_.indices, sum_.values, strict=True)]


def test_topk_on_two_ranks() -> None:
    # n = 5, density 0.4: k = 2.
    cluster = SimulatedCluster(recipe("topk", density=0.4), num_elements=5, size=2)
    # Step 1. Rank 0 has (5, -1, 2, 0, -3): its two largest magnitudes are 5 and -3, at 0 and 4.
    #         Rank 1 has (-2, 1, 4, 4, 1): 4 and 4, at 2 and 3.
    first = cluster.synchronize([floats(5, -1, 2, 0, -3), floats(-2, 1, 4, 4, 1)])[0]
    assert pairs(first) == [(0, 5.0), (4, -3.0), (2, 4.0), (3, 4.0)]
    # What was sent is gone, each rank's own only.
    assert [residual.tolist() for residual in cluster.residuals()] == [[0, -1, 2, 0, 0], [-2, 1, 0, 0, 1]]
    # Step 2 with gradients (1, -1, 0, 0, 1) and (-1, 0, 0, 0, 1):
    #   rank 0 accumulates (1, -2, 2, 0, 1): -2 at 1 and 2 at 2.
    #   rank 1 accumulates (-3, 1, 0, 0, 2): -3 at 0 and 2 at 4.
    second = cluster.step([floats(1, -1, 0, 0, 1), floats(-1, 0, 0, 0, 1)])
    assert second.tolist() == [-3, -2, 2, 0, 2]
    assert [residual.tolist() for residual in cluster.residuals()] == [[1, 0, 0, 0, 1], [0, 1, 0, 0, 0]]
    # Step 3 without a gradient: rank 0 holds two ones, at 0 and 4; rank 1 a one at 1 and, its other
    # places being all 0, the first of them, 0. Index 0 comes twice; the sum adds both up.
    third = cluster.synchronize([np.zeros(5, np.float32), np.zeros(5, np.float32)])[0]
    assert pairs(third) == [(0, 1.0), (4, 1.0), (0, 0.0), (1, 1.0)]
    assert not np.any(cluster.residuals())


def test_micro_who_searches_which_part() -> None:
    # Algorithm 1 with P = 3, n = 7: the remainder of 7 / 3 goes to part 0: parts [0, 3), [3, 5), [5, 7).
    # The paper's threshold starts at 1 / (2 sqrt(k)); k = round(0.6 * 7) = 4, so 0.25; all gradients
    # are 1, so everything in a window is above it.
    cluster = SimulatedCluster(recipe("micro", density=0.6, threshold="paper"), num_elements=7, size=3)
    parts = [[0, 1, 2], [3, 4], [5, 6]]
    for step in range(5):
        sum_ = cluster.synchronize([np.ones(7, np.float32) for _ in range(3)])[0]
        # Rank i searches part (t + i) mod 3, and messages come in rank order:
        # t = 0: parts 0 1 2, t = 1: parts 1 2 0, t = 2: parts 2 0 1, then again.
        searched = [parts[(step + rank) % 3] for rank in range(3)]
        assert sum_.indices.tolist() == [index for part in searched for index in part]
        assert sum_.counts.tolist() == [len(part) for part in searched]
        # everyone's value at the union: 3 ranks of 1
        assert sum_.values.tolist() == [3.0] * 7
        assert not np.any(cluster.residuals())


def test_micro_sends_what_others_hold_too() -> None:
    # n = 4, P = 2, density 0.25: k = 1; parts [0, 2) and [2, 4). The threshold is each rank's own largest.
    cluster = SimulatedCluster(recipe("micro", density=0.25), num_elements=4, size=2)
    # Step 1: rank 0 has (8, 1, 2, 0), threshold 8, searches part 0: selects 0.
    #         rank 1 has (3, 1, 4, 9), threshold 9, searches part 1: selects 3.
    # Both send at 0 and 3: 8 + 3 and 0 + 9; both clear 0 and 3.
    first = cluster.synchronize([floats(8, 1, 2, 0), floats(3, 1, 4, 9)])[0]
    assert pairs(first) == [(0, 11.0), (3, 9.0)]
    assert [residual.tolist() for residual in cluster.residuals()] == [[0, 1, 2, 0], [0, 1, 4, 0]]
    # The union had 2 elements, k is 1: one too many, so in step 2 nobody sends, and no turn is used up.
    # Step 3, parts swapped, gradients 0: rank 0's threshold is 2, searches part 1: selects 2.
    #         rank 1's threshold is 4, searches part 0, where it holds (0, 1): selects nothing.
    nothing = [np.zeros(4, np.float32), np.zeros(4, np.float32)]
    assert pairs(cluster.synchronize(nothing)[0]) == []
    third = cluster.synchronize(nothing)[0]
    assert pairs(third) == [(2, 6.0)]
    assert third.counts.tolist() == [1, 0]
    assert [residual.tolist() for residual in cluster.residuals()] == [[0, 1, 0, 0], [0, 1, 0, 0]]


def test_telemetry_of_exdyna() -> None:
    # n = 8, P = 2, density 0.5: k = 4. Blocks of one element, parts [0, 4) and [4, 8).
    cluster = SimulatedCluster(recipe("exdyna", density=0.5, rebalance="none", threshold=Sketch()), 8, 2)
    # Rank 0: (9, 8, 7, 1, 6, 5, 0, 0): the fourth largest is 6; in its part [0, 4) 9, 8, 7 pass: 3.
    # Rank 1: (9, 8, 7, 6, 5, 1, 1, 0): the fourth largest is 6; in its part [4, 8) nothing passes: 0.
    gradients = [floats(9, 8, 7, 1, 6, 5, 0, 0), floats(9, 8, 7, 6, 5, 1, 1, 0)]
    sum_ = cluster.synchronize(gradients)[0]
    assert sum_.counts.tolist() == [3, 0]
    # Eq. (5): f = P * max / sum = 2 * 3 / 3 = 2.  Eq. (6): |k - k'| / n = |4 - 3| / 8.
    assert sum_.facts == {"threshold": 6.0, "imbalance": 2.0, "density_error": 0.125}
    last = cluster.buckets[0].last
    assert (last.num_target, last.num_selected, last.num_received) == (4, 3, 3)
    # Eq. (1): the first step began with empty residuals.
    assert last.global_error == 0.0
    # Held back: rank 0 (0, 0, 0, 1, 6, 5, 0, 0), norm sqrt(62); rank 1 (0, 0, 0, 6, 5, 1, 1, 0), sqrt(63).
    norms = [bucket.last.residual_norm for bucket in cluster.buckets]
    assert norms == pytest.approx([62**0.5, 63**0.5], rel=1e-6)
    # So the next step begins with a global error of their mean; a rank tells its norm to 8 bits.
    cluster.synchronize([np.zeros(8, np.float32), np.zeros(8, np.float32)])
    assert cluster.buckets[1].last.global_error == pytest.approx((62**0.5 + 63**0.5) / 2, rel=2**-8)


def test_equal_magnitudes_do_not_send_the_whole_window() -> None:
    cluster = SimulatedCluster(recipe("micro", density=0.01), 10_000, 4)
    sums = cluster.synchronize([np.ones(10_000, np.float32) for _ in range(4)])
    assert sums[0].counts.tolist() == [100, 100, 100, 100]


@pytest.mark.parametrize("blocks", [(5, -5, 0), (0, 6, -6)])
def test_other_bounds_on_one_rank_are_found_out_by_all(blocks: tuple[int, ...]) -> None:
    found = 0
    for rank in range(3):
        cluster, generator = SimulatedCluster(recipe("exdyna", density=0.1), 600, 3), np.random.default_rng(1)
        steps = generator.standard_normal((5, 3, 600)).astype(np.float32)
        for step in steps[:4]:
            cluster.step(list(step))
        state = cluster.buckets[rank].state
        moved = state.partitions.num_blocks + np.array(blocks)
        partitions = replace(state.partitions, num_blocks=moved)
        cluster.buckets[rank].state = replace(state, partitions=partitions)
        ends = cluster.synchronize(list(steps[4]), keep_errors=True)
        errors = [end for end in ends if isinstance(end, StateMismatchError)]
        assert len(errors) in (0, 3)
        found += bool(errors)
        if not errors:
            assert np.unique(ends[0].indices).size == ends[0].indices.size
    assert found


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
    request, nothing = next(coroutine), np.array([6, 0, 0, 0, 0, 0], np.int32)  # a message without elements
    for target, source, blocks in expected:
        assert isinstance(request, Exchange)
        (peer, words), *others = request.sends.items()
        assert (peer + 1, [rank + 1 for rank in request.sources], others) == (target, [source], [])
        message = unpack_sum(words, 1, WireFormat(), 60, np.float32)
        # values ascend, so the last element of every block is its largest
        assert message.indices.tolist() == [10 * block - 1 for block in blocks]
        assert message.values.tolist() == [10.0 * block for block in blocks]
        request = coroutine.send({source - 1: nothing})


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
