"""The primitives on a GPU, in Triton, named as in `horovod_sparse.tensors.plain_kernels`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from horovod_sparse.tensors.triton import fold as _fold
from horovod_sparse.tensors.triton import select as _select


def _there(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function run with its tensors' CUDA device as the current one, where Triton launches."""

    @functools.wraps(function)
    def launch(values: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        if values.device.type != "cuda":  # Triton's interpreter
            return function(values, *arguments, **more)
        with torch.cuda.device(values.device):
            return function(values, *arguments, **more)

    return launch


fold, add, add_sum = _there(_fold.fold), _there(_fold.add), _there(_fold.add_sum)
refresh_maxima, put, zero = _there(_fold.refresh_maxima), _there(_fold.put), _there(_fold.zero)
at_least, largest = _there(_select.at_least), _there(_select.largest)
kth, find_kth = _there(_select.kth), _there(_select.find_kth)
