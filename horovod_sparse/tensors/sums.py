"""A single tensor, sparsified: over all ranks, or as one rank sends it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from horovod_sparse.feedback import Bucket, Recipe
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors.gradients import memory_of
from horovod_sparse.tensors.layout import dtype_name
from horovod_sparse.training import allreduce


def is_sparsifiable(tensor: Any) -> bool:
    """True for a dense tensor of a type that sparsifiers take."""
    return dtype_name(tensor) is not None and tensor.layout == torch.strided


def prepared(
    tensor: torch.Tensor, recipe: Recipe, name: str, place: tuple[int, int]
) -> tuple[torch.Tensor, tuple[Bucket, Any, Callable[..., object]]]:
    """Returns a tensor for the sum, and its bucket, what the bucket folds, and what writes the sum."""
    given = tensor.detach().contiguous()
    memory = memory_of(tensor.device, name)
    info = BucketInfo(name, tensor.numel(), *place, dtype_name(tensor) or "unknown")
    total = torch.empty_like(given)
    bucket = allreduce.stateless_bucket(recipe, info, memory.accumulator)
    write = partial(memory.write, [total.view(-1)], [(0, tensor.numel())])
    return total, (bucket, memory.foldable([given.view(-1)]), write)


def sparsified(tensor: torch.Tensor, recipe: Recipe, name: str) -> torch.Tensor:
    """Returns a tensor as one rank sends it; the very tensor if it is not finite, or has no elements."""
    allreduce.refuse_gradients(tensor.requires_grad and torch.is_grad_enabled())
    if tensor.numel() == 0:
        return tensor
    total, work = prepared(tensor, recipe, name, (0, 1))
    return total if allreduce.write_alone(*work) else tensor
