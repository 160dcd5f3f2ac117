"""Where the tensor primitives are tested: plain PyTorch and Triton, on the GPU if there is one.

Without a GPU Triton's own interpreter carries out the kernels, which is slow but exact: the same tests,
with fewer and smaller examples.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when a kernel is declared, that is when its module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@dataclass(frozen=True)
class Place:
    kernels: Any
    device: str
    num_examples: int
    max_elements: int


def _why_no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    version = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    numpy = tuple(int(part) for part in np.__version__.split(".")[:2])
    if version < (3, 4):
        return "the kernels need Triton 3.4"
    if not HAS_GPU and version < (3, 9) and numpy >= (2, 4):
        return "the interpreter of Triton before 3.9 does not work with NumPy 2.4"
    return None


def _places() -> Iterator[Any]:
    yield pytest.param(("plain", "cpu", 100, 3000), id="plain-cpu")
    reason = _why_no_triton()
    if HAS_GPU:
        yield pytest.param(("plain", "cuda", 30, 30_000), id="plain-cuda")
        budget = ("triton", "cuda", 100, 300_000)
    else:
        budget = ("triton", "cpu", 6, 700)
    yield pytest.param(budget, id="triton", marks=pytest.mark.skipif(bool(reason), reason=reason or "-"))


@pytest.fixture(params=_places())
def place(request: pytest.FixtureRequest) -> Place:
    name, device, num_examples, max_elements = request.param
    modules = {"plain": "plain_kernels", "triton": "triton"}
    kernels = importlib.import_module(f"horovod_sparse.tensors.{modules[name]}")
    return Place(kernels, device, num_examples, max_elements)
