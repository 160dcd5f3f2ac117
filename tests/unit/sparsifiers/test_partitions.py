"""ExDyna's partitions: worked by hand, and against the printed algorithms."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.sparsifiers.exdyna import ExDyna, Partitions, move_proportionally, partition

# Algorithm 3 of ExDyna line by line as printed, with the paper's names and order; where the scan lost
# a sign (lines 17, 18 and 28) it is restored from the mirrored case.


def algorithm_3(
    t: int,
    rank: int,
    k_t: list[float],
    blk_part: list[int],
    blk_pos: list[int],
    *,
    n_g: int,
    sz_blk: int,
    alpha: float,
    blk_move: int,
    min_blk: float,
) -> tuple[int, int]:
    """What worker `rank` searches at iteration t (first and last + 1 element); moves blocks in place.

    k_t[i] is what worker i selected at iteration t - 1.
    """
    n = len(k_t)
    temp = [0.0] * n
    for i in range(n):
        j = ((t - 1) % n + i) % n
        temp[j] = k_t[i]
    k_t = temp
    pk_prev = sum(k_t) / n
    den_prev = sum(k_t) / n_g
    for i in range(n - 1):
        det = k_t[i] / pk_prev
        det2 = k_t[i + 1] / pk_prev
        k_move = blk_move * sz_blk * den_prev
        if det > alpha and det2 < 1 / alpha:
            if blk_part[i] - blk_move < min_blk:
                continue
            blk_part[i] -= blk_move
            blk_part[i + 1] += blk_move
            blk_pos[i + 1] -= blk_move
            k_t[i] -= k_move
            k_t[i + 1] += k_move
        if det < 1 / alpha and det2 > alpha:
            if blk_part[i + 1] - blk_move < min_blk:
                continue
            blk_part[i] += blk_move
            blk_part[i + 1] -= blk_move
            blk_pos[i + 1] += blk_move
            k_t[i] += k_move
            k_t[i + 1] -= k_move
    alloc = (t % n + rank) % n
    st_part = blk_pos[alloc] * sz_blk
    end_part = (blk_pos[alloc] + blk_part[alloc]) * sz_blk
    return st_part, end_part


quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def test_algorithm_2_by_hand() -> None:
    # n = 1024 * 97 = 99 328, n_b = 1024: temp = 97, sz_blk = 97 - 97 % 32 = 96. At 96 elements per block
    # 99 328 // 96 = 1034 blocks fit and 64 elements are left over. P = 4: quotient 258, remainder 2.
    parts = partition(99_328, 4)
    assert parts.block_length == 96
    assert parts.num_blocks.tolist() == [259, 259, 258, 258]
    # part 1 begins behind 259 blocks; the last ends with the bucket, 64 elements behind its last block
    assert parts.window(0, 99_328) == (0, 259 * 96)
    assert parts.window(1, 99_328) == (259 * 96, 518 * 96)
    assert parts.window(3, 99_328) == (776 * 96, 99_328)
    assert 99_328 - 1034 * 96 == 64


@quick
@given(st.integers(1, 300_000), st.integers(1, 40), st.integers(1, 2048))
def test_parts_cover_the_bucket_and_are_nearly_equal(num_elements: int, size: int, num_blocks: int) -> None:
    parts = partition(num_elements, size, num_blocks)
    windows = [parts.window(part, num_elements) for part in range(size)]
    assert windows[0][0] == 0
    assert windows[-1][1] == num_elements
    assert [stop for _, stop in windows[:-1]] == [start for start, _ in windows[1:]]
    assert (parts.num_blocks >= 0).all()
    # no two parts differ by more than a block, the rest (less than a block) apart
    lengths = [stop - start for start, stop in windows]
    assert max(lengths) - min(lengths) < 2 * parts.block_length
    assert num_elements < 4 * size or parts.num_blocks.min() >= 4, "blocks to move"


@quick
@given(st.data())
def test_as_printed(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9))
    quotient = data.draw(st.integers(1, 20))
    num_blocks = 4 * size * quotient  # min_blk = n_b / (4 P) is then whole, as it is in the public constants
    sz_blk = data.draw(st.sampled_from([32, 64]))
    num_elements = num_blocks * sz_blk
    blk_move = data.draw(st.integers(1, 3))
    alpha = data.draw(st.sampled_from([1.0, 1.05, 1.3]))
    ours = partition(num_elements, size, num_blocks)
    blk_part = ours.num_blocks.tolist()
    blk_pos = [sum(blk_part[:part]) for part in range(size)]
    sparsifier = ExDyna(rebalance="paper", alpha=alpha, blocks_per_move=blk_move)
    infos = [BucketInfo("w", num_elements, rank, size) for rank in range(size)]
    states = [sparsifier.init(info) for info in infos]
    states = [replace(state, partitions=ours) for state in states]
    constants: Any = {"n_g": num_elements, "sz_blk": sz_blk, "alpha": alpha, "blk_move": blk_move}
    constants["min_blk"] = num_blocks / (4 * size)
    for t in range(1, data.draw(st.integers(2, 25))):
        by_rank = data.draw(st.lists(st.integers(0, 50), min_size=size, max_size=size).filter(any))
        for rank, info in enumerate(infos):
            none = np.empty(0, np.int32)
            after = sparsifier.observed(replace(states[rank], step=t - 1), info, np.array(by_rank), none)
            states[rank] = replace(after, step=t)
        windows = []
        for rank in range(size):
            # each worker runs the algorithm on its own copy of the same numbers
            part, pos = list(blk_part), list(blk_pos)
            windows.append(algorithm_3(t, rank, list(map(float, by_rank)), part, pos, **constants))
        blk_part, blk_pos = part, pos
        assert [sparsifier.window(state, info) for state, info in zip(states, infos, strict=True)] == windows


def test_half_the_way_by_hand() -> None:
    # 100 blocks of 10 elements, bounds (0, 50, 100). Selected: 30 in each of the blocks 10 to 19, so half
    # of them lie before block 15. (A little is added to every block, a thousandth of a mean block; 15
    # becomes 15.002 at most.) 150 per part: the step is 0.5 * 150 / 160 = 0.46875 of the 35 blocks from
    # 50 to 15: 50 - 16.4 = 33.6, rounded 34. With step 1: 50 - 32.8 = 17.2, rounded 17.
    selected = np.repeat(np.arange(100, 200, dtype=np.int32), 3)
    partitions = Partitions(10, np.array([50, 50]))
    assert move_proportionally(partitions, selected).num_blocks.tolist() == [34, 66]
    assert move_proportionally(partitions, selected, step=1.0).num_blocks.tolist() == [17, 83]


@quick
@given(st.integers(1, 9), st.integers(1, 5000), st.data())
def test_proportional_moves_keep_all_blocks(size: int, num_elements: int, data: st.DataObject) -> None:
    partitions = partition(num_elements, size, data.draw(st.integers(1, 300)))
    total = int(partitions.num_blocks.sum())
    drawn = data.draw(st.lists(st.integers(0, num_elements - 1)))
    selected = np.repeat(np.array(drawn, np.int32), data.draw(st.sampled_from([1, 1000])))
    after = move_proportionally(partitions, selected, step=data.draw(st.sampled_from([0.1, 0.5, 1.0])))
    assert after.num_blocks.sum() == total
    assert after.num_blocks.min() >= min(1, total // size)
