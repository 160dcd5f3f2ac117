"""Where the tensor primitives are tested: plain PyTorch and Triton, on the GPU if there is one.

Without a GPU Triton's own interpreter carries out the kernels, which is slow but exact: the same tests,
with fewer and smaller examples.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when a kernel is declared, that is when its module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@dataclass(frozen=True)
class Place:
    """An implementation, where it runs, and how much of it a test can afford."""

    kernels: Any
    device: str
    num_examples: int
    max_elements: int


def _places() -> Iterator[Any]:
    yield pytest.param(("torch_plain", "cpu", 100, 3000), id="plain-cpu")
    missing = importlib.util.find_spec("triton") is None
    if HAS_GPU:
        yield pytest.param(("torch_plain", "cuda", 30, 30_000), id="plain-cuda")
        budget = ("triton_backend", "cuda", 100, 300_000)
    else:
        budget = ("triton_backend", "cpu", 6, 700)
    reason = "Triton is not installed: pip install triton"
    yield pytest.param(budget, id="triton", marks=pytest.mark.skipif(missing, reason=reason))


@pytest.fixture(params=_places())
def place(request: pytest.FixtureRequest) -> Place:
    name, device, num_examples, max_elements = request.param
    kernels = importlib.import_module(f"horovod_sparse.kernels.{name}")
    return Place(kernels, device, num_examples, max_elements)
