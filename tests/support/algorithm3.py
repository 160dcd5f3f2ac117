"""ExDyna's Algorithms 2 and 3, line by line as printed, to compare our own form with.

Nothing is shared with `horovod_sparse.sparsifiers.exdyna`, and nothing is made pleasant: names,
order and the two separate conditions are the paper's. Where the scan of the paper lost a sign (lines
17, 18 and 28) it is restored from the mirrored case.
"""

from __future__ import annotations

__all__ = ["algorithm_2", "algorithm_3"]


def algorithm_2(n_g: int, n_b: int, n: int) -> tuple[int, list[int], list[int]]:
    """sz_blk, blk_part and blk_pos for n workers."""
    temp = n_g // n_b
    sz_blk = temp - temp % 32
    quotient = n_b // n
    remainder = n_b % n
    blk_part = [0] * n
    blk_pos = [0] * n
    for i in range(n):
        if i in range(remainder):
            blk_part[i] = quotient + 1
        else:
            blk_part[i] = quotient
    for i in range(1, n):
        blk_pos[i] = blk_part[i - 1] + blk_pos[i - 1]
    return sz_blk, blk_part, blk_pos


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
