"""Which gradients an accumulator takes, and whether they are cleared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from horovod_sparse.arrays import gradients
from horovod_sparse.errors import ArgumentError

__all__ = ["KeptTensor", "accumulating", "checked_gradient"]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class KeptTensor:
    """A gradient that is folded and left as it is: what `GradientParts` are on the host."""

    tensor: torch.Tensor


def accumulating(dtype: Any) -> torch.dtype:
    """As `gradients.accumulating`, as a dtype of PyTorch.

    Example:
        >>> accumulating("bfloat16"), accumulating(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float64 if gradients.accumulating(dtype) is np.float64 else torch.float32


def checked_gradient(gradient: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A gradient that fits the accumulator's values, without its history.

    Raises:
        ArgumentError: number of elements, device or type do not fit.
    """
    if gradient.numel() != values.numel():
        raise ArgumentError("gradient", tuple(gradient.shape), f"a tensor of {values.numel()} elements")
    if gradient.device != values.device:
        raise ArgumentError("gradient", gradient.device, f"a tensor on {values.device}")
    if gradient.dtype not in ((torch.float64,) if values.dtype == torch.float64 else _NARROW):
        raise ArgumentError("gradient", gradient.dtype, f"a type that accumulates in {values.dtype}")
    return gradient.detach()
