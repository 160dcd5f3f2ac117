"""PyTorch's tensors as the rest of the package sees them: NumPy views, dtype names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["dtype_name", "host_view", "on_host"]

_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def dtype_name(tensor: torch.Tensor) -> str | None:
    """Name of a dtype that gradients may have, as in `BucketInfo.dtype`; None for another.

    Example:
        >>> dtype_name(torch.zeros(1, dtype=torch.bfloat16)), dtype_name(torch.zeros(1, dtype=torch.int64))
        ('bfloat16', None)
    """
    return _NAMES.get(tensor.dtype)


def host_view(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's memory as an array of the same shape and strides; bfloat16 as its bits in uint16.

    Example:
        >>> host_view(torch.ones(2, dtype=torch.bfloat16))
        array([16256, 16256], dtype=uint16)
    """
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: np.ndarray = tensor.numpy()
    return array


def on_host(saved: Any) -> Any:
    """A checkpoint's nested values with all tensors on the CPU, wherever they were loaded to.

    Example:
        >>> on_host({"values": [torch.zeros(2), 3]})
        {'values': [tensor([0., 0.]), 3]}
    """
    if isinstance(saved, torch.Tensor):
        return saved.detach().cpu()
    if isinstance(saved, Mapping):
        return {key: on_host(value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(on_host(value) for value in saved)
    return saved
