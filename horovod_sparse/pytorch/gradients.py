"""Gradients that are tensors: which an accumulator takes, how they are clipped, how sums are written."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_sparse.arrays import gradients
from horovod_sparse.arrays.clipping import check_norm
from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.kernels.host.scatter import checked
from horovod_sparse.pytorch.backend import kernels_for
from horovod_sparse.pytorch.transfer import to_device, to_host

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


def apply_sum(dense: torch.Tensor, indices: Any, values: Any, kernels: ModuleType | None = None) -> int:
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
    dense: torch.Tensor, indices: Any, values: Any, scale: float, kernels: ModuleType | None = None
) -> int:
    """Does on a tensor what `kernels.apply_scaled_sum` does on the host, bit for bit: see there.

    Args:
        dense: zeros; as in `apply_sum`.
        indices: host, shape (k,), within [0, n), in any order, may repeat; None for all elements.
        values: host, shape (k,), float32 or float64.
        scale: factor of the sums.
        kernels: another implementation than the device's.

    Returns:
        How many different elements the sum has.

    Raises:
        ArgumentError, MessageError: as in `apply_sum`.
    """
    if indices is None:
        flat = _flat(dense)
        if np.size(values) != flat.numel():
            raise MessageError(f"{np.size(values)} values came for a bucket of {flat.numel()} elements")
        flat.copy_(to_device(np.ascontiguousarray(values), flat.device) * scale)
        return flat.numel()
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
