"""The primitives on a GPU, in Triton, named as in `horovod_sparse.tensors.plain_kernels`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from horovod_sparse.tensors.triton import fold as _fold
from horovod_sparse.tensors.triton import select as _select


def _placed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function run with its tensors' CUDA device as the current one, where Triton launches."""

    @functools.wraps(function)
    def launch(values: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        if values.device.type != "cuda":  # Triton's interpreter
            return function(values, *arguments, **more)
        with torch.cuda.device(values.device):
            return function(values, *arguments, **more)

    return launch


fold, add, add_sum = _placed(_fold.fold), _placed(_fold.add), _placed(_fold.add_sum)
refresh_maxima, put, zero = _placed(_fold.refresh_maxima), _placed(_fold.put), _placed(_fold.zero)
at_least, largest = _placed(_select.at_least), _placed(_select.largest)
kth, find_kth = _placed(_select.kth), _placed(_select.find_kth)
