"""What the PyTorch and the Triton kernels agree on: integer types of magnitudes, limits, block size."""

from __future__ import annotations

import torch

__all__ = ["device_block_size", "infinity_bits", "int_type", "magnitudes", "num_magnitude_bits"]


def device_block_size(density: float) -> int:
    """Elements per block on an accelerator, for a density.

    The k-th largest block maximum bounds the k-th largest element, and about k blocks pass it. They
    are read again, so 1/8 of the blocks should pass: one read in 32 bytes of traffic. Larger blocks
    than 1024 would save nothing any more, smaller ones than 32 are not one transaction.

    Args:
        density: kept fraction, in (0, 1].

    Returns:
        A power of two from 32 to 1024.

    Example:
        >>> [device_block_size(density) for density in (0.1, 0.001, 1e-6)]
        [32, 128, 1024]
    """
    block = 1024
    while block > 32 and block * density > 0.125 + 0.01:
        block //= 2
    return block


def int_type(dtype: torch.dtype) -> torch.dtype:
    """The signed type as wide as float32 or float64: magnitude bits are below its sign."""
    return torch.int64 if dtype == torch.float64 else torch.int32


def num_magnitude_bits(dtype: torch.dtype) -> int:
    """31 or 63."""
    return 63 if dtype == torch.float64 else 31


def infinity_bits(dtype: torch.dtype) -> int:
    """Magnitude bits of Inf: smaller are finite, larger are NaN."""
    return 0x7FF0000000000000 if dtype == torch.float64 else 0x7F800000


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """The bits without the sign; they order like the magnitudes, Inf and NaN on top.

    Args:
        values: float32 or float64.

    Returns:
        int32 or int64, a fresh tensor.
    """
    kind = int_type(values.dtype)
    return values.view(kind) & torch.iinfo(kind).max
