"""What threshold rules ask of all magnitudes, in plain PyTorch: counts above thresholds, and moments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horovod_sparse.device.bits import magnitudes
from horovod_sparse.kernels.layout import Layout

__all__ = ["count_at_least", "moments"]

# Elements that are worked on together, which bounds the memory for intermediates.
_TILE = 1 << 22


def count_at_least(values: Tensor, maxima: Tensor, layout: Layout, thresholds: Sequence[int]) -> Tensor:
    """How many magnitudes reach each threshold.

    Args:
        maxima: upper bounds.
        thresholds: magnitude bits, 1 or more.

    Returns:
        int64, one per threshold.
    """
    counts = torch.zeros(len(thresholds), dtype=torch.int64, device=values.device)
    for piece in values.split(_TILE):
        keys = magnitudes(piece)
        counts += torch.stack([(keys >= bits).sum() for bits in thresholds]) if thresholds else 0
    return counts


def moments(values: Tensor, bits: int) -> Tensor:
    """Number, sum, sum of squares and sum of logarithms of the magnitudes that reach a threshold.

    Args:
        bits: magnitude bits, 1 or more.

    Returns:
        float64, shape (4,).
    """
    out = torch.zeros(4, dtype=torch.float64, device=values.device)
    for piece in values.split(_TILE):
        size = piece[magnitudes(piece) >= bits].abs().double()
        number = torch.full((), size.numel(), dtype=torch.float64, device=values.device)
        out += torch.stack([number, size.sum(), size.square().sum(), size.log().sum()])
    return out
