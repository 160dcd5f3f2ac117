"""Selection in plain PyTorch: thresholds, the k-th largest, exactly the k largest."""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_sparse.device.bits import magnitudes
from horovod_sparse.kernels.layout import Layout

__all__ = ["at_least", "kth", "largest"]


def _candidates(
    values: Tensor, maxima: Tensor, layout: Layout, threshold: int | Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Positions (int64, ascending) and magnitude bits of what reaches the threshold in a window."""
    block = layout.block
    first, last = start // block, -(-stop // block)
    passing = first + (maxima[first:last] >= threshold).nonzero().view(-1)
    where = (passing[:, None] * block + torch.arange(block, device=values.device)).view(-1)
    where = where[(where >= start) & (where < stop)]
    keys = magnitudes(values[where])
    hits = keys >= threshold
    return where[hits], keys[hits]


def at_least(
    values: Tensor, maxima: Tensor, layout: Layout, bits: int, start: int, stop: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """Positions in [start, stop) whose magnitude bits are >= bits, ascending.

    Args:
        maxima: upper bounds.
        bits: 1 or more.
        capacity: how many there is room for.

    Returns:
        How many there are (int32, shape (1,)), and the positions: only the first that many of them count,
        and if there was not room for all, none.
    """
    found, _ = _candidates(values, maxima, layout, bits, start, stop)
    count = torch.full((1,), found.numel(), dtype=torch.int32, device=values.device)
    return count, found[:capacity].to(torch.int32)


def _smallest(
    values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int
) -> tuple[int, Tensor, Tensor]:
    """Magnitude bits of the k-th largest, and positions and bits of the candidates for the k largest."""
    first, last = layout.whole_blocks(start, stop)
    floor: int | Tensor = 1
    if k <= last - first:
        floor = maxima[first:last].topk(k).values[-1].clamp_(min=1)
    where, keys = _candidates(values, maxima, layout, floor, start, stop)
    if keys.numel() < k:
        return 0, where, keys
    return int(keys.topk(k).values[-1]), where, keys


def kth(values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int, dense: bool) -> Tensor:
    """The k-th largest magnitude of a window, 1 <= k <= stop - start.

    Args:
        maxima: exact.
        dense: read the whole window instead of looking for candidates; always right here.

    Returns:
        int64, shape (2,): its magnitude bits, and 1 if there was no room for the candidates and the call
        must be repeated with `dense`.
    """
    smallest, _, _ = _smallest(values, maxima, layout, k, start, stop)
    return torch.tensor([smallest, 0], dtype=torch.int64, device=values.device)


def largest(
    values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int, dense: bool
) -> tuple[Tensor, Tensor]:
    """Exactly the k largest of a window, 0 < k <= stop - start, ascending; ties go to the lowest index.

    Args:
        maxima, dense: as in `kth`.

    Returns:
        What `kth` returns, and the positions, int32, shape (k,).
    """
    smallest, where, keys = _smallest(values, maxima, layout, k, start, stop)
    if smallest == 0:
        where = torch.arange(start, stop, device=values.device)
        keys = magnitudes(values[start:stop])
    ties = keys == smallest
    larger = keys > smallest
    chosen = larger | (ties & (ties.cumsum(0) <= k - larger.sum()))
    report = torch.tensor([smallest, 0], dtype=torch.int64, device=values.device)
    return report, where[chosen].to(torch.int32)
