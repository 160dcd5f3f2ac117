"""Where a parameter's elements lie in a bucket: in the order of the parameter's own memory."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils import dlpack

from horovod_sparse.torch.tensors import host_view

__all__ = ["alone", "memory_strides", "shaped", "unshaped", "view_into"]


def memory_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of an array that has the tensor's shape, and its order in memory where that has no gaps.

    A gradient is added to a buffer fastest when both are walked in the same order, so a parameter in
    channels_last gets a gradient in channels_last. A tensor with gaps or overlaps (an expanded one)
    gets the strides of a contiguous one.

    Example:
        >>> memory_strides(torch.empty(2, 3).t())
        (1, 3)
        >>> memory_strides(torch.empty(1).expand(2, 3))
        (3, 1)
    """
    expected = 1
    for length, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if length == 1:
            continue
        if stride != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= length
    return tuple(tensor.stride())


def view_into(flat: torch.Tensor, start: int, parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's part of a flat buffer, in its shape.

    Args:
        flat: 1-D, contiguous.
        start: position of the parameter's first element.
        parameter: gives shape and order.

    Example:
        >>> view_into(torch.arange(8), 2, torch.empty(2, 3).t())
        tensor([[2, 5],
                [3, 6],
                [4, 7]])
    """
    return flat.as_strided(parameter.shape, memory_strides(parameter), start)


def alone(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A part of a flat buffer as a tensor with a storage of its own: same memory, but offset 0.

    PyTorch (2.13 still) adds a pure COO tensor to a dense one with the storage offset counted twice:
    autograd would write a gradient of ``gather(sparse_grad=True)`` to a wrong place, even past the end.

    Example:
        >>> flat = torch.zeros(4)
        >>> alone(flat, 1, 3).add_(1.0).storage_offset()
        0
        >>> flat
        tensor([0., 1., 1., 0.])
    """
    part: torch.Tensor = dlpack.from_dlpack(dlpack.to_dlpack(flat[start:stop]))
    return part


def shaped(values: np.ndarray, parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter's part of a bucket, in its shape, contiguous: what a checkpoint holds."""
    copy = torch.from_numpy(np.array(values))
    return view_into(copy, 0, parameter).clone(memory_format=torch.contiguous_format)


def unshaped(values: torch.Tensor, parameter: torch.Tensor) -> np.ndarray:
    """The inverse of `shaped`: the values in the order in which they lie in the bucket.

    Example:
        >>> parameter = torch.empty(2, 3).t()
        >>> unshaped(shaped(np.arange(6.0), parameter), parameter)
        array([0., 1., 2., 3., 4., 5.])
    """
    flat = torch.empty(parameter.numel(), dtype=values.dtype)
    view_into(flat, 0, parameter).copy_(values)
    return host_view(flat)
