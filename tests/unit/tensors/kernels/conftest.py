"""Where the tensor primitives are tested: plain PyTorch and Triton, on the GPU if there is one.

Without a GPU Triton's own interpreter carries out the kernels, which is slow but exact: the same tests,
with fewer and smaller examples.
"""

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
    kernels: Any
    device: str
    num_examples: int
    max_elements: int


def _places() -> Iterator[Any]:
    from horovod_sparse.tensors import plain_kernels
    from horovod_sparse.tensors.accumulator import _load_triton_kernels

    triton = _load_triton_kernels()
    yield pytest.param(Place(plain_kernels, "cpu", 100, 3000), id="plain-cpu")
    if HAS_GPU:
        yield pytest.param(Place(plain_kernels, "cuda", 30, 30_000), id="plain-cuda")
    place = Place(triton, "cuda", 100, 300_000) if HAS_GPU else Place(triton, "cpu", 6, 700)
    missing = pytest.mark.skipif(triton is plain_kernels, reason="no Triton here that has all it takes")
    yield pytest.param(place, id="triton", marks=missing)


@pytest.fixture(params=_places())
def place(request: pytest.FixtureRequest) -> Place:
    return request.param
