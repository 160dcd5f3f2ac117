"""Tensors as NumPy, buckets and checkpoints see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import dlpack

from horovod_sparse.errors import ArgumentError, StateMismatchError

_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def dtype_name(tensor: torch.Tensor) -> str | None:
    """Name of a dtype that gradients may have, as in `BucketInfo.dtype`; None for another."""
    return _NAMES.get(tensor.dtype)


def on_host(saved: Any) -> Any:
    """A checkpoint's nested values with all tensors on the CPU, wherever they were loaded to."""
    if isinstance(saved, torch.Tensor):
        return saved.detach().cpu()
    if isinstance(saved, Mapping):
        return {key: on_host(value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(on_host(value) for value in saved)
    return saved


def memory_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of an array that has the tensor's shape, and its order in memory where that has no gaps.

    A gradient is added to a buffer fastest when both are walked in the same order (channels_last). A tensor
    with gaps or overlaps gets the strides of a contiguous one.

    Example:
        >>> memory_strides(torch.empty(2, 3).t()), memory_strides(torch.empty(1).expand(2, 3))
        ((1, 3), (3, 1))
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
    """The parameter's part of a flat buffer, in its shape."""
    return flat.as_strided(parameter.shape, memory_strides(parameter), start)


def alone(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A part of a flat buffer as a tensor with a storage of its own: same memory, but offset 0.

    PyTorch (2.13 still) adds a pure COO tensor to a dense one with the storage offset counted twice: autograd
    would write a gradient of ``gather(sparse_grad=True)`` to a wrong place, even past the end.
    """
    part: torch.Tensor = dlpack.from_dlpack(dlpack.to_dlpack(flat[start:stop]))
    return part


def shaped(values: np.ndarray, parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter's part of a bucket, in its shape, contiguous: what a checkpoint holds."""
    copy = torch.from_numpy(np.array(values))
    return view_into(copy, 0, parameter).clone(memory_format=torch.contiguous_format)


def unshaped(values: torch.Tensor, parameter: torch.Tensor) -> np.ndarray:
    """The inverse of `shaped`: the values in the order in which they lie in the bucket."""
    flat = torch.empty(parameter.numel(), dtype=values.dtype)
    view_into(flat, 0, parameter).copy_(values)
    array: np.ndarray = flat.numpy()
    return array


class _AsWritable:
    """Presents an array's memory as writable: PyTorch warns about memory that is not, even to read it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array  # keeps the memory alive
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def readable_tensor(array: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor, to be read only (a copy only where it is not contiguous)."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_AsWritable(array)))


def host_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with all of its tensors on the host; a `StateMismatchError` if it is nested without end."""
    try:
        return dict(on_host(entry)) if isinstance(entry, Mapping) else on_host(entry)
    except RecursionError as error:
        raise StateMismatchError("the saved state is nested without end") from error


def redistribute(entries: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The entry for one rank of another number of ranks, so that the mean residual is kept exactly.

    Of P old ranks and Q new ones, old rank o belongs to new rank o mod Q if Q < P, and to all new ranks
    r with r mod P = o otherwise. Each of its h holders takes ``e_o * Q / (P * h)``; so the mean over new
    ranks is ``1/Q * sum_o h * e_o * Q / (P * h)``, the mean over old ranks.

    Args:
        entries: of all old ranks, in any order; of sharded parameters those of all that had the same shard.
        rank: new rank, from 0.
        size: Q.

    Returns:
        An entry for ``load_state_dict``: of an optimizer as ``state["horovod_sparse"]``, of
        `horovod_sparse.ddp` as it is.

    Raises:
        StateMismatchError: if the entries are not those of all old ranks of one run.
        ArgumentError: if there is no such rank.
    """
    from horovod_sparse.training.state import redistributed

    if not entries:
        raise ArgumentError("entries", entries, "the entry of every old rank")
    if len({repr(entry.get("shard")) for entry in entries}) > 1:
        raise StateMismatchError("entries of different shards were given: give those of the ranks with one")
    return redistributed([on_host(entry) for entry in entries], rank, size)
