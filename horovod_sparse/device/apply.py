"""Scatter into and clear gradients that are tensors, with checked indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_sparse.device.backend import TensorKernels, kernels_for
from horovod_sparse.device.transfer import to_device, to_host
from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.kernels.host_apply import checked

__all__ = ["apply_scaled_sum", "apply_sum", "clear_at"]

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _flat(dense: torch.Tensor) -> torch.Tensor:
    if dense.dtype not in _DTYPES:
        raise ArgumentError("dtype", dense.dtype, "float32, float64, float16 or bfloat16")
    if not dense.is_contiguous():
        raise ArgumentError("dense", tuple(dense.stride()), "a contiguous tensor")
    return dense.detach().view(-1)


def _stand_apart(indices: NDArray[np.int32]) -> bool:
    """Whether no index stands twice, where that is seen quickly.

    Messages are ascending, so the array is a few ascending stretches. Exclusive sparsifiers send
    stretches that do not overlap: sorted by where they begin, each ends before the next.
    """
    ends = np.flatnonzero(indices[1:] <= indices[:-1])
    firsts = indices[np.concatenate([[0], ends + 1])]
    lasts = indices[np.concatenate([ends, [indices.size - 1]])]
    order = np.argsort(firsts, kind="stable")
    return bool((lasts[order][:-1] < firsts[order][1:]).all())


def apply_sum(dense: torch.Tensor, indices: Any, values: Any, kernels: TensorKernels | None = None) -> int:
    """Adds values to a dense tensor (a zeroed gradient, usually) at the given places.

    Does what `kernels.apply_sum` does on the host, bit for bit: repeated indices add up in order, for
    float16 and bfloat16 in float32 with a single rounding at the end; a sum that cancels to zero is
    stored as -0.0 in float32 and float64. No two threads add to one element, so every rank gets the
    same bits.

    Args:
        dense: float32, float64, float16 or bfloat16, contiguous, on any device; changed.
        indices: host, shape (k,), within [0, n), in any order, may repeat.
        values: host, shape (k,).
        kernels: another implementation than the device's.

    Returns:
        How many different elements held +0.0 before: the size of the union, if dense was zero.

    Raises:
        ArgumentError: the tensor is not contiguous, or of another type.
        MessageError: an index is outside, or the lengths differ; nothing was written then.

    Example:
        >>> gradient = torch.zeros(4)
        >>> apply_sum(gradient, np.array([1, 3, 1]), np.array([1.0, 2.0, 0.5]))
        2
        >>> gradient.tolist()
        [0.0, 1.5, 0.0, 2.0]
    """
    flat = _flat(dense)
    where = checked(indices, flat.numel())
    kind = np.float64 if flat.dtype == torch.float64 else np.float32
    new = np.ascontiguousarray(values).reshape(-1).astype(kind, copy=False)
    if new.size != where.size:
        raise MessageError(f"{where.size} indices came with {new.size} values")
    if where.size == 0:
        return 0
    kernels = kernels_for(flat.device) if kernels is None else kernels
    unique = _stand_apart(where)
    places, added = to_device(where, flat.device), to_device(new, flat.device)
    if not unique:
        places, order = torch.sort(places, stable=True)
        added = added[order]
    return int(to_host(kernels.add_sum(flat, places, added, unique))[0])


def apply_scaled_sum(
    dense: torch.Tensor, indices: Any, values: Any, scale: float, kernels: TensorKernels | None = None
) -> int:
    """Does on a tensor what `arrays.apply_scaled_sum` does on the host, bit for bit: see there.

    Args:
        dense: zeros; as in `apply_sum`.
        indices: host, shape (k,), within [0, n), in any order, may repeat.
        values: host, shape (k,), float32 or float64.
        scale: factor of the sums.
        kernels: another implementation than the device's.

    Returns:
        How many different elements the sum has.

    Raises:
        ArgumentError, MessageError: as in `apply_sum`.
    """
    if scale != 1.0 and dense.dtype not in (torch.float32, torch.float64):
        values, scale = values * values.dtype.type(scale), 1.0
    num_union = apply_sum(dense, indices, values, kernels)
    if scale != 1.0 and np.size(indices):
        flat = _flat(dense)
        # an index that stands twice is written twice with the same value
        where = to_device(checked(indices, flat.numel()), flat.device).long()
        flat[where] = flat[where] * scale
    return num_union


def clear_at(dense: torch.Tensor, indices: Any) -> None:
    """Sets the given places of a dense tensor to 0.

    Args:
        dense: as in `apply_sum`.
        indices: host, shape (k,), within [0, n).

    Raises:
        ArgumentError: the tensor is not contiguous, or of another type.
        MessageError: an index is outside; nothing was written then.
    """
    flat = _flat(dense)
    where = checked(indices, flat.numel())
    flat.index_fill_(0, to_device(where, flat.device).long(), 0.0)
