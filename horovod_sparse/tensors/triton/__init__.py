"""The primitives on a GPU, in Triton, named as in `horovod_sparse.tensors.plain_kernels`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from horovod_sparse.tensors.triton import fold as _fold
from horovod_sparse.tensors.triton import select as _select


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function run with its tensors' CUDA device as the current one, where Triton launches."""

    @functools.wraps(function)
    def on_device(values: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        if values.device.type != "cuda":  # Triton's interpreter
            return function(values, *arguments, **more)
        with torch.cuda.device(values.device):
            return function(values, *arguments, **more)

    return on_device


fold, add, add_sum = _on_device(_fold.fold), _on_device(_fold.add), _on_device(_fold.add_sum)
refresh_maxima, put, zero = _on_device(_fold.refresh_maxima), _on_device(_fold.put), _on_device(_fold.zero)
at_least, largest = _on_device(_select.at_least), _on_device(_select.largest)
kth, find_kth = _on_device(_select.kth), _on_device(_select.find_kth)
