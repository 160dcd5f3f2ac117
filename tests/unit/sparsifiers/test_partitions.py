"""ExDyna's partitions: worked by hand, and against the printed algorithms."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.sparsifiers.exdyna import ExDyna, partition

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
    assert partition(1024 * 120, 4).block_length == 96  # 120 - 120 % 32


@quick
@given(st.data())
def test_the_papers_rebalancing_is_algorithm_3_as_printed(data: st.DataObject) -> None:
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
            after = sparsifier.learn_union(replace(states[rank], step=t - 1), info, np.array(by_rank), none)
            states[rank] = replace(after, step=t)
        windows = []
        for rank in range(size):
            # each worker runs the algorithm on its own copy of the same numbers
            part, pos = list(blk_part), list(blk_pos)
            windows.append(algorithm_3(t, rank, list(map(float, by_rank)), part, pos, **constants))
        blk_part, blk_pos = part, pos
        assert [sparsifier.window(state, info) for state, info in zip(states, infos, strict=True)] == windows
