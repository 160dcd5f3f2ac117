"""How far a gradient is scaled down to a norm, found on its device."""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_sparse.arrays.clipping import check_norm

__all__ = ["clip", "take_out"]


def clip(gradient: Tensor, clip_norm: float, *, keep: bool = False) -> Tensor:
    """``gradient *= min(1, clip_norm / norm)``, the norm being that of the finite elements; never waits.

    Args:
        gradient: any shape and strides. Changed; NaN and Inf stay what they are.
        clip_norm: above 0.
        keep: leave the gradient as it is.

    Returns:
        The gradient, or with `keep` a clipped copy of it.

    Raises:
        ArgumentError: clip_norm is not above 0.

    Example:
        >>> gradient = torch.tensor([3.0, float("nan"), 4.0])
        >>> clip(gradient, 1.0)
        tensor([0.6000,    nan, 0.8000])
    """
    check_norm(clip_norm)
    if gradient.numel() == 0:
        return gradient
    finite = torch.nan_to_num(gradient.double(), nan=0.0, posinf=0.0, neginf=0.0)
    top = finite.abs().max()
    # Relative to the largest, so that no square overflows.
    norm = top * torch.linalg.vector_norm(finite / torch.where(top > 0, top, 1.0))
    factor = torch.where(norm > clip_norm, clip_norm / norm, 1.0)
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    clipped = wide * factor.to(wide.dtype)
    return clipped if keep else gradient.copy_(clipped)


def take_out(values: Tensor, step: Tensor) -> None:
    """``values -= step``, where a fold has added it; see `clipping.take_out`."""
    without = values - step
    left_out = ~torch.isfinite(values + step) & (without.abs() > values.abs())
    values.copy_(torch.where(torch.isfinite(without) & ~left_out, without, values))
