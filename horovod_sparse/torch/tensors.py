"""PyTorch's memory as the rest of the package sees it: NumPy views, dtype names, accumulators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from horovod_sparse.arrays import Accumulator, HostAccumulator
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.sparsifiers import BucketInfo

__all__ = ["dtype_name", "host_view", "make_accumulator"]

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


def make_accumulator(info: BucketInfo, recipe: Recipe, device: torch.device) -> Accumulator:
    """The memory of a bucket, on the device where its gradients are.

    This is the one place that knows which accumulator belongs to which device.

    Args:
        info: the facts of the bucket.
        recipe: decides how many companions are kept, and the block size.
        device: of the gradients.

    Raises:
        UnsupportedError: for a device that has none.
    """
    if device.type != "cpu":
        raise UnsupportedError(
            f"the gradient of {info.name} is on {device}: sparsifiers work on CPU tensors so far. Keep the "
            "model on the CPU, or use compression=Compression.none or .fp16"
        )
    arguments: dict[str, Any] = {
        "density": recipe.sparsifier.density,
        "companions": recipe.feedback.num_companions,
    }
    return HostAccumulator(info.num_elements, info.dtype, **arguments)
