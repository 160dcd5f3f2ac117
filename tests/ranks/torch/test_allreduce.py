"""Tensors that are summed sparsely, by our allreduce and by Horovod's with our compressor."""

import time

import horovod.torch as stock
import numpy as np
import pytest
import torch

import horovod_sparse.torch as hvd
from horovod_sparse.errors import (
    ArgumentError,
    NonFiniteGradientError,
    NonFiniteSumError,
    StateMismatchError,
    UnsupportedError,
)
from horovod_sparse.torch import Compression, SparseCompressor
from support.cases import CASES, on_ranks
from support.gradients import DTYPES
from support.stateless import check_compressed, check_sum

pytestmark = pytest.mark.controllers
TOP = Compression.topk(density=0.25)


def summed(array: np.ndarray, recipe, name: str, **arguments) -> np.ndarray:
    half = array.dtype == np.uint16
    tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if half else torch.from_numpy(array)
    total = hvd.allreduce(tensor, name=name, op=hvd.Sum, compression=SparseCompressor(recipe), **arguments)
    return total.view(torch.int16).numpy().view(np.uint16) if half else total.numpy()


@pytest.mark.parametrize("case", on_ranks())
def test_a_sum_is_the_simulators_and_loses_only_what_is_not_sent(rank, size, case):
    check_sum(case, summed, range(size), rank)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_dtype_is_summed_as_the_simulator_does(rank, size, dtype):
    check_sum(CASES[0], summed, range(size), rank, dtype)


def test_the_ranks_of_a_process_set_sum_among_themselves(rank, size, process_set):
    some = process_set(range(1, size))
    if rank == 0:
        with pytest.raises(ArgumentError, match="process_set"):
            hvd.allreduce(torch.ones(2), compression=TOP, process_set=some)
    else:

        def within(array, recipe, name):
            return summed(array, recipe, name, process_set=some)

        check_sum(CASES[0], within, range(1, size), rank)


@pytest.mark.parametrize("case", on_ranks())
def test_horovods_allreduce_sums_what_each_rank_would_send(rank, size, case):
    def by_horovod(array, recipe, name):
        compressor = SparseCompressor(recipe)
        return stock.allreduce(
            torch.from_numpy(array), name=name, op=stock.Sum, compression=compressor
        ).numpy()

    check_compressed(case, by_horovod, size, rank)


def test_shapes_layouts_and_factors(rank, size):
    every = Compression.topk(density=1.0)
    for tensor in (
        torch.tensor(3.0),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(8.0)[::2],
        torch.empty(0, 3),
    ):
        total = hvd.allreduce(tensor, compression=every, prescale_factor=2.0, postscale_factor=0.25)
        assert total.shape == tensor.shape and torch.equal(total, tensor * 0.5)
    with torch.no_grad():
        assert hvd.allreduce(torch.ones(2, requires_grad=True), compression="topk:density=1.0").tolist() == [
            1,
            1,
        ]
    kept = Compression.topk(density=0.25, dense_below=5, densities={"all": 1.0})
    assert hvd.allreduce(torch.ones(4), compression=kept).tolist() == [1.0] * 4
    assert hvd.allreduce(torch.ones(8), compression=kept, name="all").tolist() == [1.0] * 8
    assert hvd.allreduce(torch.ones(8), compression=kept).sum() == 2


def test_what_is_not_sparsified_is_horovods(rank, size):
    for name, compressor in ((None, TOP), ("none", Compression.none)):
        total = hvd.allreduce(torch.full((3,), 2), name=name, op=hvd.Sum, compression=compressor)
        assert total.tolist() == [2 * size] * 3
    handle = hvd.allreduce_async(torch.full((3,), 2), op=hvd.Max, compression=TOP)
    assert hvd.synchronize(handle).tolist() == [2] * 3
    for compressor in (TOP, Compression.none):
        total = stock.grouped_allreduce(
            [torch.arange(4.0), torch.full((3,), 2)], name="both", op=stock.Sum, compression=compressor
        )
        assert total[0][3] == 3 * size and total[1].tolist() == [2 * size] * 3


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


def test_numbers_that_are_not_finite(rank, size):
    given = torch.ones(8)
    if rank == size - 1:
        given[3] = torch.nan
    with pytest.raises(NonFiniteGradientError, match=f"rank {size - 1}: "):
        hvd.allreduce(given, compression=TOP)
    with pytest.raises(NonFiniteSumError):
        hvd.allreduce(torch.full((8,), 6e4, dtype=torch.float16), op=hvd.Sum, compression=TOP)
    assert stock.allreduce(given, name="nan", compression=TOP).isnan().tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_what_needs_every_element_or_a_gradient_is_refused(rank, size):
    for op, words in (
        (hvd.Min, "op='Min' is not allowed: give Average or Sum"),
        (hvd.Adasum, "op=Adasum cannot"),
    ):
        with pytest.raises((ArgumentError, UnsupportedError), match=words):
            hvd.allreduce(torch.ones(3), compression=TOP, op=op)
    for allreduce in (hvd.allreduce, stock.allreduce):
        with pytest.raises(UnsupportedError, match="detach"):
            allreduce(torch.ones(3, requires_grad=True), compression=TOP)
    with pytest.raises(ArgumentError, match="a sparsifier or Compression"):
        hvd.allreduce_async(torch.ones(3), compression=Compression.fp16)


@pytest.mark.parametrize(
    ("tensor", "compressor", "words"),
    [
        (lambda rank: torch.ones(4 + rank), TOP, r"shape differs: .*ranks \[0\] have \[4\]"),
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
