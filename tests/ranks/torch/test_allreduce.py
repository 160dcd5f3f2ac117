"""Tensors of PyTorch that are summed sparsely, by our allreduce and by Horovod's with our compressor."""

# ruff: noqa: F403
import time

import horovod.torch as stock
import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from conformance.allreduce import *
from conformance.allreduce import Front
from horovod_sparse.errors import ArgumentError, NonFiniteSumError, StateMismatchError, UnsupportedError
from horovod_sparse.torch import Compression

pytestmark = pytest.mark.controllers
TOP = Compression.topk(density=0.25)


def tensor_of(array: np.ndarray) -> torch.Tensor:
    half = array.dtype == np.uint16
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if half else torch.from_numpy(array)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    half = tensor.dtype == torch.bfloat16
    return tensor.view(torch.int16).numpy().view(np.uint16) if half else tensor.numpy()


FRONT = Front(stock, hvd, tensor_of, array_of)


def test_layouts_and_rules_of_parameters(rank, size):
    every = Compression.topk(density=1.0)
    for tensor in (torch.arange(6.0).view(2, 3).t(), torch.arange(8.0)[::2]):
        assert torch.equal(hvd.allreduce(tensor, compression=every), tensor)
    with torch.no_grad():
        total = hvd.allreduce(torch.ones(2, requires_grad=True), compression="topk:density=1.0")
    assert total.tolist() == [1, 1]
    kept = Compression.topk(density=0.25, dense_below=5, densities={"all": 1.0})
    assert hvd.allreduce(torch.ones(4), compression=kept).tolist() == [1.0] * 4
    assert hvd.allreduce(torch.ones(8), compression=kept, name="all").tolist() == [1.0] * 8
    assert hvd.allreduce(torch.ones(8), compression=kept).sum() == 2
    handle = hvd.allreduce_async(torch.full((3,), 2), op=hvd.Max, compression=TOP)
    assert hvd.synchronize(handle).tolist() == [2] * 3


def test_many_at_once_in_different_orders(rank, size):
    tensors = [torch.arange(9.0) * (number + rank) for number in range(5)]
    compressor = Compression.gtopk(density=0.3)
    if rank:
        time.sleep(0.5)  # no sum of rank 0 is done before
    handles = [
        hvd.allreduce_async(tensor, name=f"many.{number}", op=hvd.Sum, compression=compressor)
        for number, tensor in enumerate(tensors)
    ]
    for tensor in tensors:
        tensor.fill_(torch.nan)  # which the sums have read
    if rank == 0:
        with pytest.raises(UnsupportedError, match=r"many\.2 is synchronized while"):
            hvd.allreduce_async(tensors[2], name="many.2", compression=compressor)
    order = range(5) if rank % 2 else range(4, -1, -1)
    totals = {number: hvd.synchronize(handles[number]) for number in order}
    assert all(map(hvd.poll, handles))
    assert [totals[number][8].item() for number in range(5)] == [
        8.0 * sum(number + one for one in range(size)) for number in range(5)
    ]


def test_what_needs_a_gradient_or_is_too_large_is_refused(rank, size):
    for allreduce in (hvd.allreduce, stock.allreduce):
        with pytest.raises(UnsupportedError, match="detach"):
            allreduce(torch.ones(3, requires_grad=True), compression=TOP)
    with pytest.raises(ArgumentError, match="a sparsifier or Compression"):
        hvd.allreduce_async(torch.ones(3), compression=Compression.fp16)
    with pytest.raises(NonFiniteSumError):
        hvd.allreduce(torch.full((8,), 6e4, dtype=torch.float16), op=hvd.Sum, compression=TOP)


@pytest.mark.parametrize(
    ("tensor", "compressor", "words"),
    [
        (lambda rank: torch.ones(4 * rank), TOP, r"shape differs: .*ranks \[0\] have \[0\]"),
        (lambda rank: torch.ones(4).to([torch.float32, torch.float64][rank % 2]), TOP, "dtype differs"),
        (lambda rank: torch.ones(4), "topk:density=0.{}", "compression differs"),
    ],
)
def test_ranks_that_give_something_else_are_named_on_all(rank, size, tensor, compressor, words):
    if isinstance(compressor, str):
        compressor = compressor.format(rank + 1)
    with pytest.raises(StateMismatchError, match=words):
        hvd.allreduce(tensor(rank), name="differs", compression=compressor)
