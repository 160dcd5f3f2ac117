"""What the accumulators of host and tensors refuse, and what they make of odd gradients."""

import logging
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from horovod_sparse.arrays import FoldRule, HostAccumulator
from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.tensors import accumulator as torch_backend
from horovod_sparse.tensors import plain_kernels as torch_plain
from horovod_sparse.tensors.accumulator import TorchAccumulator

MAKE: dict[str, Any] = {"host": HostAccumulator, "tensor": partial(TorchAccumulator, device="cpu")}
WRITES = ("add", "put")
NAN, AT_4 = float("nan"), np.array([4], np.int32)


def folding(num_elements: int = 4, kind: Any = np.float32, companions: int = 0, **rule: Any) -> Any:
    def fold(make: Any) -> None:
        gradient = np.zeros(num_elements, kind)
        given = gradient if make is HostAccumulator else torch.from_numpy(gradient)
        make(4, companions=companions).fold(given, FoldRule(**rule))

    return fold


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda make: make(4, density=0.0), r"density=0\.0"),
        (lambda make: make(2**31), r"fewer than 2\*\*31"),
        (lambda make: make(4, dtype="int32"), "dtype='int32'"),
        (folding(3), "4 elements"),
        (folding(kind=np.float64), "float32, .*bfloat16"),
        (folding(momentum=0.9), "companions=1"),
        (folding(moment=0.9), "companions=1"),
        (folding(moment=1.0), "second moment"),
        (folding(moment=0.9, momentum=0.9), "no momentum"),
        (folding(companions=1, moment=0.9, eps=0.0), "a floor above 0"),
        (folding(companions=1, moment=0.9, rate=NAN), "finite rate"),
        (folding(decay=NAN), "decay"),
        (lambda make: make(4).kth_magnitude(0), "a rank from 1"),
        (lambda make: make(4).kth_magnitude(3, 2, 4), "a rank from 1"),
        (lambda make: make(4).largest(-1), "0 or more"),
        (lambda make: make(4).at_least(1.0, 3, 5), "a window within"),
        (lambda make: make(4).at_least(NAN), "threshold"),
        *((lambda make, way=way: getattr(make(4), way)(AT_4), "index 4") for way in ("take", "clear")),
        *((lambda make, way=way: getattr(make(4), way)(AT_4, np.ones(1)), "index 4") for way in WRITES),
        *((lambda make, way=way: getattr(make(4), way)([1], np.ones(2)), "one for each") for way in WRITES),
    ],
)
def test_wrong_arguments_of_accumulators_are_refused(make: Any, call: Any, words: str) -> None:
    with pytest.raises(MessageError if words == "index 4" else ArgumentError, match=words):
        call(make)


def test_gradients_of_another_kind_or_place_are_refused() -> None:
    host = HostAccumulator(10)
    for kind in (np.int64, np.dtype(">f4")):
        with pytest.raises(ArgumentError, match="dtype="):
            host.fold(np.zeros(10, kind))
    with pytest.raises(ArgumentError, match="a tensor on cpu"):
        TorchAccumulator(4, device="cpu").fold(torch.zeros(4, device="meta"))


def test_strided_gradients_are_folded(place: Any) -> None:
    matrix = torch.arange(12.0, device=place.device).view(3, 4)
    accumulator = TorchAccumulator(12, device=place.device, kernels=place.kernels)
    expected = matrix.t().reshape(-1).cpu().numpy()
    accumulator.fold(matrix.t())
    np.testing.assert_array_equal(accumulator.values(), expected)


@pytest.mark.parametrize("where", ["host", "tensor"])
def test_values_stay_finite(where: str, place: Any) -> None:
    """What would not stay finite adds nothing, and NaN and Inf are not loaded."""
    top = float(np.finfo(np.float32).max)
    given = np.array([1.0, 2.0, top, 4.0, 5.0], np.float32)
    if where == "host":
        accumulator: Any = HostAccumulator(5)
        accumulator.fold(given.copy())
    else:
        accumulator = TorchAccumulator(5, device=place.device, kernels=place.kernels)
        accumulator.fold(torch.from_numpy(given.copy()).to(place.device))
    accumulator.add(np.arange(5, dtype=np.int32), np.array([1, np.nan, top, np.inf, -1], np.float32))
    np.testing.assert_array_equal(accumulator.values(), np.array([2, 2, top, 4, 4], np.float32))
    for wrong in (np.nan, -np.inf, 1e39):
        with pytest.raises(ArgumentError, match="finite numbers"):
            accumulator.assign(np.array([1, wrong, 2, 3, 4]))
    assert accumulator.values()[0] == 2.0
    accumulator.abandon()
    np.testing.assert_array_equal(accumulator.values(), given)


def test_cuda_without_triton_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    torch_backend._load_triton_kernels.cache_clear()
    with caplog.at_level(logging.WARNING, logger="horovod_sparse"):
        chosen = [torch_backend.kernels_for(torch.device("cuda", 0)) for _ in range(2)]
    torch_backend._load_triton_kernels.cache_clear()
    assert chosen == [torch_plain, torch_plain]
    assert ["Triton" in record.message for record in caplog.records] == [True]
