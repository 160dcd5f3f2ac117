"""Which implementation of the primitives serves a device."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch

from horovod_sparse.pytorch import plain

_log = logging.getLogger("horovod_sparse")

# The one that comes with PyTorch 2.8; 3.3 does not compile all of the kernels.
_OLDEST_TRITON = (3, 4)


def kernels_for(device: torch.device) -> ModuleType:
    """The fastest implementation for a device: Triton for CUDA where it is installed, else plain PyTorch.

    Returns:
        A module with the functions of `plain`, which do what is said there, whoever does it.
    """
    return _triton() if device.type == "cuda" else plain


@functools.cache
def _triton() -> ModuleType:
    try:
        import triton

        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        if version < _OLDEST_TRITON:
            raise ImportError(
                f"Triton {triton.__version__} is older than {'.'.join(map(str, _OLDEST_TRITON))}"
            )
        from horovod_sparse.pytorch import triton as triton_kernels
    except ImportError as error:
        _log.warning(
            "sparsifiers on CUDA use plain PyTorch, several times slower than their Triton kernels: %s", error
        )
        return plain
    return triton_kernels
